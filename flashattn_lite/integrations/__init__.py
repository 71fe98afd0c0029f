"""Our attention in other people's frameworks, one file each. Importing them imports no framework."""

from flashattn_lite.integrations import transformers

__all__ = ["transformers"]
