"""LTX-Video."""

from tritium.models.family import Family

FAMILY = Family(name="ltx", denoisers=("LTXVideoTransformer3DModel",), blocks=("LTXVideoTransformerBlock",))
