"""What engines say in their answers about the weights that made them. Pure.

Read are SGLang's `/generate`, completions and chat (spans since 0.5.20, one label before), vLLM's `RequestOutput` and
`/inference/v1/generate` (0.32), completions and chat with `return_weight_versions` (0.33), and verl's `TokenOutput`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controlplane.machine.provenance import LabelledTokens
from schemas.errors import ConfigError

Sequences = list[tuple[LabelledTokens, ...]]


def labelled_tokens(answer: object, model: str = "") -> Sequences:
    """Return the labels of the tokens of each sequence of an answer.

    Args:
        answer: As JSON decoded it, or the engine's own object; or a list of them.
        model: Engine's name of the adapter's version that made it. Then the labels of base weights are ignored.

    Raises:
        ConfigError: It does not name its weights, or how many tokens it has.
    """
    if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        return [sequence for part in answer for sequence in labelled_tokens(part, model)]
    parts = _get(answer, "choices") or _get(answer, "outputs")
    if not parts:
        return [_sequence(answer, _get(answer, "meta_info") or _get(answer, "metadata") or answer, model)]
    whole = _get(answer, "metadata") if len(parts) == 1 else None  # SGLang's: of the first sequence only
    usage = _get(answer, "usage") if len(parts) == 1 else None
    return [_sequence(part, whole if _get(part, "weight_versions") is None else part, model, usage) for part in parts]


def model_of(answer: object) -> str:
    """Return the name of the model that an answer names; empty if it names none."""
    name = _get(answer, "model")
    return name if isinstance(name, str) else ""


def _sequence(part: object, said: object, model: str, usage: object = None) -> tuple[LabelledTokens, ...]:
    spans, count = _get(said, "weight_versions"), _count(part, said, usage)
    if count is None and spans:
        count = max(int(_get(span, "end")) for span in spans)
    if count is None:
        raise ConfigError("the answer does not say how many tokens it has: pass it as the engine gave it")
    if model:
        return (LabelledTokens(model, 0, count),)
    if spans:
        return tuple(LabelledTokens(str(_get(span, "version")), *_ends(span)) for span in spans)
    return tuple(LabelledTokens(label, begin, end) for label, begin, end in _whole(part, said, count))


def _whole(part: object, said: object, count: int) -> Iterator[tuple[str, int, int]]:
    """The label of a sequence that has no spans. Of two, all tokens count as made by the older weights."""
    extra = _get(part, "extra_fields")
    if (label := _get(said, "weight_version")) is not None:
        yield str(label), 0, count
    elif (first := _get(extra, "min_global_steps", _get(extra, "global_steps"))) is not None:
        yield str(first), 0, count
        if (last := _get(extra, "max_global_steps", first)) != first:
            yield str(last), count, count
    elif count:
        raise ConfigError(
            "the answer does not say which weights made it. SGLang says so from 0.5.20 on; vLLM from 0.32 on in "
            "process and at /inference/v1/generate (--enable-scale-out), and from 0.33 on with "
            "return_weight_versions. For an adapter, pass model= with the name that the request had"
        )


def _count(part: object, said: object, usage: object) -> int | None:
    for place, key in ((said, "completion_tokens"), (usage, "completion_tokens")):
        if isinstance(value := _get(place, key), int):
            return value
    for key in ("token_ids", "output_ids"):
        if isinstance(value := _get(part, key), Sequence):
            return len(value)
    return None


def _ends(span: object) -> tuple[int, int]:
    return int(_get(span, "start")), int(_get(span, "end"))


def _get(place: object, key: str, default: Any = None) -> Any:
    """A value of a JSON object, or an attribute of an engine's own object."""
    if isinstance(place, Mapping):
        return place.get(key, default)
    return default if place is None else getattr(place, key, default)
