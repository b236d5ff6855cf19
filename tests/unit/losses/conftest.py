"""Checks the shapes and dtypes that the annotations of losses and ops promise while these tests run."""

from jaxtyping import install_import_hook

install_import_hook(["xtoken_core.losses", "xtoken_core.ops"], "beartype.beartype")
