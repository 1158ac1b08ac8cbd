"""What an environment takes and gives, and how one is built from its id."""

from __future__ import annotations

import difflib
import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from paceline.config import EnvConfig
from paceline.envs.guard import Guard
from paceline.errors import ConfigError, EnvironmentFaultError
from paceline.rows import NUMPY_TYPES, Column
from paceline.telemetry import get_logger

_AUTORESET = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
# Element types that rows have no column for, or that the float32 networks would only narrow later.
_STORED_TYPES = {"float64": "float32", "int8": "int32", "int16": "int32", "uint16": "int32", "uint64": "int64"}


@dataclass(frozen=True)
class EnvironmentDescription:
    """What an environment takes and gives, as rows store it."""

    id: str
    observation: Column
    """float64 is stored as float32, which is what the networks compute in."""
    action: Column
    action_low: tuple[float, ...]
    """Smallest action, flattened; finite."""
    action_high: tuple[float, ...]
    """Largest action, flattened; finite."""
    max_episode_steps: int | None
    """The limit that Gymnasium cuts episodes at; None: there is none, or the environment keeps its own."""

    @property
    def observation_dim(self) -> int:
        """Elements of one observation."""
        return math.prod(self.observation.shape)

    @property
    def action_dim(self) -> int:
        """Elements of one action."""
        return math.prod(self.action.shape)


def describe_environment(config: EnvConfig, *, algorithm: str = "sac") -> EnvironmentDescription:
    """Build one environment, read its spaces, and close it.

    Raises:
        ConfigError: the id is unknown, the arguments do not fit, or `algorithm` cannot act in its spaces.
        EnvironmentFaultError: its constructor raised.
    """
    _require_registered(config.id)
    with _building(config):
        environment: gymnasium.Env[Any, Any] = gymnasium.make(config.id, disable_env_checker=True, **config.kwargs)
    try:
        spec = environment.spec
        return describe_spaces(
            config.id,
            environment.observation_space,
            environment.action_space,
            max_episode_steps=None if spec is None else spec.max_episode_steps,
            algorithm=algorithm,
        )
    finally:
        environment.close()


def describe_spaces(
    environment_id: str,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    *,
    max_episode_steps: int | None = None,
    algorithm: str = "sac",
) -> EnvironmentDescription:
    """The description of an environment with these spaces. Raises ConfigError where `algorithm` cannot act in them."""
    if not isinstance(observation_space, gymnasium.spaces.Box):
        raise ConfigError(
            f"environment {environment_id!r} has observation space {observation_space}: expected a Box; "
            "wrap it in gymnasium.wrappers.FlattenObservation where you register it"
        )
    if not isinstance(action_space, gymnasium.spaces.Box):
        kind = (
            "a discrete"
            if isinstance(action_space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete)
            else "the"
        )
        raise ConfigError(
            f"environment {environment_id!r} has {kind} action space {action_space}: {algorithm} chooses continuous "
            "actions and needs a Box with finite bounds; choose such an environment, as Pendulum-v1 is"
        )
    if not np.issubdtype(action_space.dtype, np.floating):
        raise ConfigError(
            f"environment {environment_id!r} has action space {action_space} of {action_space.dtype}: "
            f"{algorithm} chooses continuous actions and needs a Box of floating numbers"
        )
    if not action_space.is_bounded():
        raise ConfigError(
            f"environment {environment_id!r} has action space {action_space}: {algorithm} needs finite bounds; "
            "wrap it in gymnasium.wrappers.RescaleAction or ClipAction with bounds where you register it"
        )
    return EnvironmentDescription(
        id=environment_id,
        observation=Column("observation", _stored_type(environment_id, observation_space), observation_space.shape),
        action=Column("action", "float32", action_space.shape),
        action_low=tuple(map(float, action_space.low.ravel())),
        action_high=tuple(map(float, action_space.high.ravel())),
        max_episode_steps=max_episode_steps,
    )


def make_vector_environment(config: EnvConfig, count: int) -> VectorEnv[Any, Any, Any]:
    """`count` environments of the configured id behind Gymnasium's vector interface, unseeded.

    Every environment is guarded: what it raises or returns against its own spaces travels in the infos of a step.

    Raises:
        ConfigError: the id is unknown or the arguments do not fit.
        EnvironmentFaultError: a constructor raised.
    """
    _require_registered(config.id)
    vector_kwargs: dict[str, Any] = {"autoreset_mode": _AUTORESET[config.autoreset]}
    if config.vectorization == "async":
        # Spawned: a forked worker would share this process's channels and threads.
        vector_kwargs["context"] = "spawn"
    with _building(config):
        return gymnasium.make_vec(
            config.id,
            count,
            config.vectorization,
            vector_kwargs=vector_kwargs,
            wrappers=[Guard],
            disable_env_checker=True,
            **config.kwargs,
        )


def _stored_type(environment_id: str, space: gymnasium.spaces.Box) -> str:
    name = np.dtype(space.dtype).name
    stored = _STORED_TYPES.get(name, name)
    if stored not in NUMPY_TYPES:
        raise ConfigError(
            f"environment {environment_id!r} has observations of {name}: expected one of {', '.join(NUMPY_TYPES)}"
        )
    return stored


def _require_registered(environment_id: str) -> None:
    """Raise ConfigError unless Gymnasium knows the id; names the nearest that it knows."""
    try:
        with _warnings_logged(environment_id):
            module, has_module, name = environment_id.rpartition(":")
            if has_module:
                importlib.import_module(module)
            gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        nearest = difflib.get_close_matches(environment_id, list(gymnasium.registry), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "no registered id is like it"
        raise ConfigError(
            f"env.id is {environment_id!r}: {error} Expected a registered Gymnasium id, or my_package:MyEnv-v0 whose "
            f"module registers it; {hint}"
        ) from error


@contextmanager
def _building(config: EnvConfig) -> Iterator[None]:
    try:
        with _warnings_logged(config.id):
            yield
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(
            f"environment {config.id!r} cannot be built with env.kwargs {config.kwargs}: "
            f"{type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        raise EnvironmentFaultError(
            f"environment {config.id!r} cannot be built with env.kwargs {config.kwargs}: its constructor raised "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _warnings_logged(environment_id: str) -> Iterator[None]:
    """Warnings within (an old version of an environment, say) are log lines, whatever the filters make of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        get_logger().warning("environment_warning", environment=environment_id, message=text)
