"""What the extended backends have in common: they name their two classes, and vLLM asks for them."""

from __future__ import annotations

from typing import Any, ClassVar


class ExtendedBackend:
    """Stands before one of vLLM's attention backends.

    Attributes:
        nwor_impl: the implementation of a layer.
        nwor_builder: the builder of a step's metadata.
        nwor_check: what of a layer is looked at beside what is looked at with every backend; it is given the
            layer's name, the layer and the engine's configuration, and raises ``Unsupported``.
        nwor_cache_views: how to see a layer's cache as strided K and V; None where it has the usual shape.
        nwor_untested: where no test has run, for the log; None where some have.

    """

    nwor_impl: ClassVar[type]
    nwor_builder: ClassVar[type]
    nwor_check: ClassVar[Any] = None
    nwor_cache_views: ClassVar[Any] = None
    nwor_untested: ClassVar[str | None] = None

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the implementation of a layer."""
        return cls.nwor_impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the builder of a step's metadata."""
        return cls.nwor_builder
