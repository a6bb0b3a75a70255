"""Profilers of training ranks, commanded over the same bus as the rollout engines.

A trainer's process opens a `TrainingRank` and annotates the stages of its step; `schemas.commands.ProfileCommand`
starts and stops the sessions. torch and the tools are imported when a session needs them.
"""

from workers.profilers.rank import TrainingRank
from workers.profilers.stages import annotate, mini_batch

__all__ = ["TrainingRank", "annotate", "mini_batch"]
