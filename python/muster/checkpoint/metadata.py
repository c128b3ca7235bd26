# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint.metadata's names, which are torch's own: they say what its
`.metadata` holds. A checkpoint of muster's says the same in muster.json (`muster checkpoint show`).
"""

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]
