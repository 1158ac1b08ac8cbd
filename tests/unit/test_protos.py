import importlib.resources
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos" / "paceline" / "v1").glob("*.proto"))
GENERATED = ROOT / "services" / "paceline" / "v1"
# These protos have no service: their stub files would be empty.
WITHOUT_SERVICE = {"rows_pb2_grpc.py", "times_pb2_grpc.py"}

MESSAGE, ENUM, SERVICE = 4, 5, 6  # field numbers within FileDescriptorProto, which paths of comments are made of
FIELD, NESTED, NESTED_ENUM = 2, 3, 4
METHOD, VALUE = 2, 2


def run_protoc(*arguments: str) -> None:
    includes = importlib.resources.files("grpc_tools") / "_proto"
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    assert protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"-I{includes}", *arguments, *names]) == 0


def test_the_generated_code_is_what_the_protos_give(tmp_path):
    run_protoc(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    fresh = {path.name: path.read_text() for path in (tmp_path / "paceline" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in GENERATED.iterdir() if path.is_file()}
    committed.pop("__init__.py")
    expected = {name: text for name, text in fresh.items() if name not in WITHOUT_SERVICE}
    assert committed.keys() == expected.keys(), "run `make protos`"
    assert [name for name, text in expected.items() if committed[name] != text] == [], "run `make protos`"


def test_everything_in_the_protos_has_a_comment_above_it(tmp_path):
    run_protoc(f"--descriptor_set_out={tmp_path / 'set'}", "--include_source_info")
    files = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    assert {file.name for file in files} == {f"paceline/v1/{path.name}" for path in PROTOS}
    bare = []
    for file in files:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        bare += [f"{file.name}: {name}" for path, name in _parts_of(file) if not comments.get(path, "").strip()]
    assert bare == []


def test_every_rpc_says_which_codes_it_returns(tmp_path):
    run_protoc(f"--descriptor_set_out={tmp_path / 'set'}", "--include_source_info")
    for file in descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for index, service in enumerate(file.service):
            for number, method in enumerate(service.method):
                comment = comments[SERVICE, index, METHOD, number]
                assert "INVALID_ARGUMENT" in comment, method.name
                assert "UNAVAILABLE" in comment, method.name
                assert "repeat" in comment.lower(), method.name


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_each_proto_is_of_the_package_that_its_folder_says(path):
    assert "package paceline.v1;" in path.read_text()


def _parts_of(file: descriptor_pb2.FileDescriptorProto):
    for index, message in enumerate(file.message_type):
        yield from _parts_of_message((MESSAGE, index), message)
    for index, enum in enumerate(file.enum_type):
        yield from _parts_of_enum((ENUM, index), enum)
    for index, service in enumerate(file.service):
        yield (SERVICE, index), service.name
        for number, method in enumerate(service.method):
            yield (SERVICE, index, METHOD, number), f"{service.name}.{method.name}"


def _parts_of_message(path: tuple[int, ...], message: descriptor_pb2.DescriptorProto):
    yield path, message.name
    for number, field in enumerate(message.field):
        yield (*path, FIELD, number), f"{message.name}.{field.name}"
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _parts_of_message((*path, NESTED, number), nested)
    for number, enum in enumerate(message.enum_type):
        yield from _parts_of_enum((*path, NESTED_ENUM, number), enum)


def _parts_of_enum(path: tuple[int, ...], enum: descriptor_pb2.EnumDescriptorProto):
    yield path, enum.name
    for number, value in enumerate(enum.value):
        yield (*path, VALUE, number), f"{enum.name}.{value.name}"
