"""What a hybrid asks of the quantizers of its two directions."""

from typing import Any

import torch

from tejit.tensor import Quantizer
from tejit.tensor.quantizer import Inner


def declared_keywords(child: Quantizer) -> dict[str, str]:
    """``{attribute: constructor keyword}`` of the storages that a child makes."""
    metadata = child.storage_metadata(torch.float32)
    return metadata["cls"]._keywords_of(metadata["nontensor_kwargs"])


def prefixed(direction: str, fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` under a hybrid's names: ``_rowwise`` + attribute, and ``rowwise_`` + keyword where it is a name."""
    return {
        f"_{direction}{name}": f"{direction}_{value}" if isinstance(value, str) else value
        for name, value in fields.items()
    }


def present(inner: Inner) -> bool:
    return any(tensor is not None for tensor in inner)


def nested_storage(child: Quantizer, inner: Inner, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    """The nested storage over a child's buffers."""
    metadata = child.storage_metadata(dtype)
    keywords = metadata["nontensor_kwargs"]
    buffers = dict(zip(metadata["cls"]._keywords_of(keywords).values(), inner, strict=True))
    return metadata["cls"]._construct(buffers, keywords, shape, device)
