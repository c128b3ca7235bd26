# SPDX-License-Identifier: BSD-3-Clause
"""The wheel's dependency: the torch it was built against, whose C++ classes it shares.

Asked by scikit-build-core.
"""

import torch


def dynamic_metadata(field, settings):
    """The value of `field` of pyproject.toml."""
    if field != "dependencies" or settings:
        raise ValueError(
            f"fitting_torch knows dependencies, without settings, and not {field} with {settings}"
        )
    return [f"torch=={torch.__version__.split('+')[0]}"]
