"""One stepping interface over Gymnasium vector environments, in whichever autoreset mode they declare.

Torch-free: the workers of `vectorization: async` import this package and nothing heavier.
"""

from paceline.envs.description import (
    EnvironmentDescription,
    describe_environment,
    describe_spaces,
    make_vector_environment,
)
from paceline.envs.seeds import acting_seed, environment_seeds
from paceline.envs.stepping import Environments, FinishedEpisode, VectorStep

__all__ = [
    "EnvironmentDescription",
    "Environments",
    "FinishedEpisode",
    "VectorStep",
    "acting_seed",
    "describe_environment",
    "describe_spaces",
    "environment_seeds",
    "make_vector_environment",
]
