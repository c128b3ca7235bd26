# SPDX-License-Identifier: BSD-3-Clause
"""PowerSGD: two thin factors of each gradient matrix travel instead of the matrix (Vogels,
Karimireddy, Jaggi, NeurIPS 2019).
"""

from muster import _C

from .default_hooks import NativeHook

__all__ = ["PowerSGDState", "powerSGD_hook", "batched_powerSGD_hook"]


class PowerSGDState:
    """Settings, and what the hooks remember from pass to pass, for one model.

    process_group: None is the model's own. matrix_approximation_rank: columns of the factors.
    start_powerSGD_iter: backward passes that average everything first; at least 2 with error
    feedback or warm start. min_compression_rate: a matrix is sent whole unless its factors are
    smaller by more than this. compression_stats_logging_frequency: backward passes between two
    lines in the log. Raises ValueError (DistArgumentError) for a rank or a rate that is not
    positive.

    pickle and `copy` keep settings and memory, without the group: each rank saves and loads its
    own, for errors differ between ranks.
    """

    def __init__(
        self,
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=1_000,
        min_compression_rate=2,
        use_error_feedback=True,
        warm_start=True,
        orthogonalization_epsilon=0,
        random_seed=0,
        compression_stats_logging_frequency=10_000,
        batch_tensors_with_same_shape=False,
    ):
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._make()

    def _make(self):
        self._native = _C._PowerSGDState(
            self.process_group,
            self.matrix_approximation_rank,
            self.start_powerSGD_iter,
            self.min_compression_rate,
            self.use_error_feedback,
            self.warm_start,
            self.orthogonalization_epsilon,
            self.random_seed,
            self.compression_stats_logging_frequency,
            self.batch_tensors_with_same_shape,
        )

    @property
    def iter(self):
        """Backward passes so far."""
        return self._native.iteration

    @property
    def total_numel_before_compression(self):
        """Elements of the passes with compression."""
        return self._native.compression_stats()[1]

    @property
    def total_numel_after_compression(self):
        """Elements that travelled for them."""
        return self._native.compression_stats()[2]

    def compression_stats(self):
        """(rate, elements before, elements after) of the passes with compression."""
        return self._native.compression_stats()

    def __getstate__(self):
        settings = {
            name: value
            for name, value in vars(self).items()
            if name not in ("process_group", "_native")
        }
        return settings, self._native.save()

    def __setstate__(self, state):
        settings, memory = state
        vars(self).update(settings, process_group=None)
        self._make()
        self._native.load(memory)


powerSGD_hook = NativeHook(
    "powerSGD_hook",
    lambda state: _C._powerSGD_hook(state._native),
    "Each gradient of two or more dimensions as a matrix of its first dimension by the rest. "
    "`state`: a PowerSGDState.",
)
batched_powerSGD_hook = NativeHook(
    "batched_powerSGD_hook",
    lambda state: _C._batched_powerSGD_hook(state._native),
    "Each bucket as one square matrix: quicker, and further from the gradients. `state`: a "
    "PowerSGDState.",
)
