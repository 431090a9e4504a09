"""The hand-made part of the truth: which statement of diffusers is which fusion site.

A tag names statements by file, function and text, and the one operation whose executions are counted: it must run
exactly once a site. Tags were written by reading diffusers, not by matching graphs. A tag that matches no statement is
an error, so a diffusers that words a line differently cannot silently lower the truth; `unexplained` finds the lines
that nobody has looked at.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from census.statements import Statement, statements


@dataclass(frozen=True)
class Tag:
    """Executions of `op` in the statements of `file` that match `text` inside functions that match `scope`."""

    family: str
    file: str
    scope: str
    text: str
    op: str

    def names(self, statement: Statement) -> bool:
        return (
            statement.file == self.file
            and re.search(self.scope, statement.scope) is not None
            and re.search(self.text, statement.text) is not None
        )


# `n * (1 + scale)`, `(1 + scale) * n`, `n * (scale.float() + 1.0)`.
MODULATION = r"\* \( ?1 \+ \w*scale|\(1 \+ \w*scale\w*\) \* |\* \(scale\.float\(\)(\[.*?\])? \+ 1\.0\)"
# `gate * y` and `y * gate`, the gate perhaps viewed, cast or squashed.
GATE = r"\b\w*gate\w*(\.unsqueeze\(1\))?(\.tanh\(\))?(\.float\(\))? \* |\* \w*gate\w*"

BLOCK = r"Block\.forward$"


def transformers(*names: str) -> list[str]:
    return [f"models/transformers/transformer_{name}.py" for name in names]


QWEN, Z_IMAGE, WAN, MOCHI, LTX2, HIDREAM = transformers("qwenimage", "z_image", "wan", "mochi", "ltx2", "hidream_image")
LTX, FLUX2, KANDINSKY = transformers("ltx", "flux2", "kandinsky")
PROCESSOR, WAN_VAE = "models/attention_processor.py", "models/autoencoders/autoencoder_kl_wan.py"
AURAFLOW = "models/transformers/auraflow_transformer_2d.py"
SANA = "models/transformers/sana_transformer.py"

TAGS = (
    Tag("rms_norm", "models/normalization.py", r"^RMSNorm\.forward", r"torch\.rsqrt\(variance", "rsqrt"),
    Tag("rms_norm", "models/normalization.py", r"^MochiRMSNorm\.forward", r"torch\.rsqrt\(variance", "rsqrt"),
    Tag("rms_norm", WAN_VAE, r"WanRMS_norm\.forward", r"F\.normalize\(", "normalize"),
    # RoPE
    Tag("rope", "models/embeddings.py", r"^apply_rotary_emb$", r"x\.float\(\) \* cos \+ x_rotated", "add"),
    Tag("rope", "models/embeddings.py", r"^apply_rotary_emb$", r"view_as_real\(x_rotated \* freqs_cis\)", "mul"),
    Tag("rope", QWEN, r"^apply_rotary_emb_qwen$", r"view_as_real\(x_rotated \* freqs_cis\)", "mul"),
    Tag("rope", Z_IMAGE, r"apply_rotary_emb$", r"view_as_real\(x \* freqs_cis\)", "mul"),
    Tag("rope", WAN, r"apply_rotary_emb$", r"out\[\.\.\., 1::2\] = x1 \* sin \+ x2 \* cos", "add"),
    Tag("rope", LTX, r"^apply_rotary_emb$", r"x\.float\(\) \* cos \+ x_rotated", "add"),
    Tag("rope", LTX2, r"^apply_interleaved_rotary_emb$", r"x\.float\(\) \* cos \+ x_rotated", "add"),
    Tag("rope", LTX2, r"^apply_split_rotary_emb$", r"out = split_x \* cos_u", "mul"),
    Tag("rope", PROCESSOR, r"^MochiAttn.*apply_rotary_emb$", r"x_even \* freqs_sin \+ x_odd", "add"),
    Tag("rope", KANDINSKY, r"apply_rotary$", r"\(rope \* x_\)\.sum\(dim=-1\)", "mul"),
    Tag("rope", HIDREAM, r"^apply_rope$", r"x[qk]_out = freqs_cis", "add"),
    # modulation
    Tag("adalayernorm", "models/normalization.py", r"^\w*(Ada|LayerNorm|RMSNormZero)\w*\.forward$", MODULATION, "mul"),
    *(
        Tag("adalayernorm", file, scope, MODULATION, "mul")
        for scope, files in {
            BLOCK: ("models/attention.py", AURAFLOW, *transformers("flux", "flux2", "lumina2", "hunyuan_video")),
            r"(Block|Pruned)\.forward$": transformers("chroma"),
            r"(Block|Model)\.forward$": transformers("wan", "ltx", "ltx2"),
            r"(Block|OutEmbed)\.forward$": transformers("hidream_image"),
            r"(Block|OutLayer)\.forward$": transformers("kandinsky"),
            r"(Block|Zero|Continuous)\.forward$": transformers("cogview4"),
            r"(Block|Norm)\.forward$": (SANA,),
            r"Model\.forward$": (f"models/transformers/{name}_transformer_2d.py" for name in ("pixart", "dit")),
            r"AdaLayerNorm\w*\.forward$": transformers("cosmos"),
            r"^MochiRMSNormZero\.forward$": transformers("mochi"),
        }.items()
        for file in files
    ),
    Tag("adalayernorm", QWEN, r"Block\._modulate$", r"x \* \(1 \+ scale_result\) \+ shift", "mul"),
    Tag("adalayernorm", Z_IMAGE, BLOCK, r"scale_msa, scale_mlp = 1\.0 \+ scale_msa", "add"),
    Tag("adalayernorm", Z_IMAGE, r"^FinalLayer\.forward$", r"self\.norm_final\(x\) \* scale", "mul"),
    # The product is inside the norm class, which also serves the gates: count the `1 + scale` of its caller.
    Tag("adalayernorm", MOCHI, r"(Block|Continuous)\.forward$", r"self\.norm\w*\(.*\(1 \+ \w*scale", "add"),
    # gated residual
    *(
        Tag("mul_add", file, BLOCK, GATE, "mul")
        for file in (
            *("models/attention.py", SANA, AURAFLOW, "models/transformers/cogvideox_transformer_3d.py"),
            *transformers("flux", "flux2", "chroma", "qwenimage", "lumina2", "cogview4", "hidream_image", "wan"),
            *transformers("hunyuan_video", "ltx", "ltx2", "cosmos", "kandinsky"),
        )
    ),
    # One statement holds a gate and a modulation: count the sum.
    Tag("mul_add", Z_IMAGE, BLOCK, r"x = x \+ gate_m\w+ \* ", "add"),
    Tag("mul_add", MOCHI, BLOCK, r"hidden_states \+ self\.norm\w*\(.*torch\.tanh\(", "add"),
    # gated linear units
    Tag("geglu", "models/activations.py", r"^GEGLU\.forward$", r"hidden_states \* self\.gelu\(gate\)", "mul"),
    Tag("swiglu", "models/activations.py", r"^SwiGLU\.forward$", r"hidden_states \* self\.activation\(gate\)", "mul"),
    Tag("swiglu", "models/attention.py", r"^LuminaFeedForward\.forward$", r"self\.silu\(.*\) \* self\.linear_3", "mul"),
    Tag("swiglu", SANA, r"^GLUMBConv\.", r"\* self\.nonlinearity\(gate\)", "mul"),
    Tag("swiglu", AURAFLOW, r"FeedForward\.forward$", r"F\.silu\(.*\) \* ", "mul"),
    Tag("swiglu", FLUX2, r"^Flux2SwiGLU\.forward$", r"self\.gate_fn\(.*\) \* x", "mul"),
    Tag("swiglu", HIDREAM, r"FeedForwardSwiGLU\.forward$", r"silu\(self\.w1\(x\)\) \* self\.w3", "mul"),
    Tag("swiglu", Z_IMAGE, r"^FeedForward\.", r"F\.silu\(x1\) \* x3", "mul"),
)

# Operations that could be a site's; a statement that runs one is tagged above or reviewed below.
SUSPICIOUS = frozenset({"mul", "addcmul", "lerp", "rsqrt", "sqrt", "normalize", "sigmoid", "tanh", "erf"})

# (file, function, text) of statements that were read and are no site of their own.
REVIEWED = (
    # sinusoidal time embeddings, position grids and tables, time scaling, masks
    (r"embeddings\.py$", r"^get_timestep_embedding$", r""),
    (r"", r"(TimestepEmbedder|GaussianFourier\w+|RotaryPosEmbed|RoPE|PatchEmbed)\.", r""),
    (
        r"",
        r"Model\.forward$",
        r"(timestep|guidance)\.to\(hidden_states\.dtype\) \* 1000|self\.t_embedder\(t \* self\.t_scale\)",
    ),
    (r"", r"Model\.forward$", r"_timestep \* timestep_cross_attn_gate_scale_factor"),
    (r"", r"", r"^(encoder_|audio_encoder_)?attention_mask = "),
    (r"embeddings\.py$", r"^MochiAttentionPool\.pool_tokens$", r"x \* mask"),
    (r"hunyuan_video\.py$", r"^HunyuanVideoTokenRefiner\.forward$", r"hidden_states \* mask_float"),
    (r"hidream_image\.py$", r"Model\.unpatchify$", r"pH \* p"),
    (r"hidream_image\.py$", r"moe_infer$", r"expert_out\.mul_\("),
    # further operations of sites that are counted by another one
    (r"normalization\.py$", r"RMSNorm\.forward$", r"hidden_states \* self\.weight"),
    (r"autoencoder_kl_wan\.py$", r"WanRMS_norm\.forward$", r"normalized \* self\.scale \* self\.gamma"),
    (r"mochi\.py$", r"^MochiModulatedRMSNorm\.forward$", r"hidden_states \* scale"),
    (
        r"z_image\.py$",
        r"Block\.forward$",
        r"self\.attention_norm1\(x\) \* scale_msa|gate_msa\.tanh\(\), gate_mlp\.tanh\(\)",
    ),
    (r"wan\.py$", r"apply_rotary_emb$", r"out\[\.\.\., 0::2\]"),
    (r"attention_processor\.py$", r"^MochiAttn.*apply_rotary_emb$", r"x_even \* freqs_cos - x_odd"),
    (r"ltx2\.py$", r"^apply_split_rotary_emb$", r"addcmul_\("),
)


def family_of(op: str, statement: Statement) -> str | None:
    """Return the family that this execution of `op` is a site of."""
    return next((tag.family for tag in _tags(statement) if tag.op == op), None)


def unexplained(calls: Iterable[tuple[str, Statement]]) -> set[Statement]:
    """Return the statements with a suspicious operation that are neither tagged nor reviewed."""
    return {
        statement for op, statement in calls if op in SUSPICIOUS and not _tags(statement) and not _reviewed(statement)
    }


@functools.cache
def _tags(statement: Statement) -> tuple[Tag, ...]:
    return tuple(tag for tag in _checked_tags() if tag.names(statement))


@functools.cache
def _reviewed(statement: Statement) -> bool:
    where = (statement.file, statement.scope, statement.text)
    return any(all(re.search(*pair) for pair in zip(patterns, where, strict=True)) for patterns in REVIEWED)


@functools.cache
def _checked_tags() -> tuple[Tag, ...]:
    for tag in TAGS:
        if not any(tag.names(statement) for statement in statements(tag.file).values()):
            raise LookupError(f"no statement of diffusers matches {tag}; its source changed, read it and tag it again")
    return TAGS
