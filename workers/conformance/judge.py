"""Judges what an engine did: a function from what was seen to what is wrong. Pure.

What an engine answers proves nothing; engines report success for what they did not do. So the evidence is what a
client of the engine sees (tokens), what it holds (memory, files), and whether its report of itself agrees with that.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, assert_never

from msgspec import Struct

from schemas.events import Observation
from schemas.identity import InFlight

Tokens = tuple[int, ...]


class InFlightRequest(Struct, frozen=True, kw_only=True):
    """One request that was running when a call came.

    Attributes:
        asked: Tokens that it asked for.
        at_return: Tokens that its client had when the call returned.
        silent: No token came any more after some time.
        ended: It had ended by then.
        made: Tokens that it had in the end, after everything ran again.
    """

    asked: int
    at_return: int
    silent: bool
    ended: bool
    made: int


class GenerateSeen(Struct, frozen=True, kw_only=True):
    """The same prompt twice. `longest`: tokens of the longest request that the engine accepted."""

    first: Tokens
    again: Tokens
    asked: int
    longest: int


class PauseSeen(Struct, frozen=True, kw_only=True):
    """A pause, with a request running, a request sent after it, and a resume.

    Attributes:
        observed: Read when the pause had returned.
        late: Tokens of the request that was sent after the pause, before the resume.
        counted: Growth of the engine's own counter of tokens while it was paused; None if it has none.
    """

    mode: InFlight
    observed: Observation
    running: InFlightRequest
    late: int
    counted: int | None


class ResumeSeen(Struct, frozen=True, kw_only=True):
    """A resume after a pause. `held` of `asked` tokens came for the request sent in between; it may be refused."""

    observed: Observation
    held: int
    asked: int
    refused: str
    before: Tokens
    after: Tokens


class AbortSeen(Struct, frozen=True, kw_only=True):
    """An abort, with a request running, and a request after it."""

    observed: Observation
    running: InFlightRequest
    before: Tokens
    after: Tokens


class RepeatSeen(Struct, frozen=True, kw_only=True):
    """Calls that were made twice. `errors` names each whose second time failed."""

    calls: tuple[str, ...]
    errors: tuple[str, ...]
    before: Tokens
    after: Tokens


class FlushSeen(Struct, frozen=True, kw_only=True):
    """A flush. `fresh`: tokens of a prompt that the engine had never seen. `reused`: of the same prompt and weights,
    after other weights had computed its prefix and a flush. Both empty if no weights can be loaded.
    """

    fresh: Tokens
    reused: Tokens


class LoadSeen(Struct, frozen=True, kw_only=True):
    """Checkpoint a, then b, then a again: the tokens of one prompt, and the labels asked for and observed."""

    tokens: tuple[Tokens, Tokens, Tokens]
    asked: tuple[int, ...]
    labels: tuple[int | None, ...]
    paused: bool
    digests: tuple[str | None, ...]


class BadCheckpointSeen(Struct, frozen=True, kw_only=True):
    """Checkpoints that can't be loaded. `answers`: for each, how it was answered by the check and by the load."""

    answers: tuple[tuple[str, str, str], ...]
    relaunched: bool
    label_kept: bool
    before: Tokens
    after: Tokens


class SleepSeen(Struct, frozen=True, kw_only=True):
    """All memory released. `used`: bytes of memory before and after, None if nobody can measure it."""

    observed: Observation
    late: int
    used: tuple[int, int] | None


class WakeSeen(Struct, frozen=True, kw_only=True):
    """All memory taken back. `late`: tokens between the wake and the resume. `used`: bytes before and after."""

    observed: Observation
    late: int
    used: tuple[int, int] | None
    before: Tokens
    after: Tokens


class TraceSeen(Struct, frozen=True):
    """One trace: what was reported, and what is on the disk (None: no such file)."""

    path: str
    reported_bytes: int
    bytes_on_disk: int | None
    readable: bool


class ProfileSeen(Struct, frozen=True, kw_only=True):
    """Two sessions one after the other, with requests in each. `grew`: files of the first that changed afterwards."""

    directories: tuple[str, str]
    during: Observation
    afterwards: Observation
    traces: tuple[tuple[TraceSeen, ...], tuple[TraceSeen, ...]]
    grew: tuple[str, ...]


class UnansweredSeen(Struct, frozen=True, kw_only=True):
    """A pause that waits for a long request, and is given too little time or is abandoned by its caller.

    Attributes:
        how: What was done to the call.
        error: How it failed; empty if it returned.
        holds: When it returned: the request had all of its tokens.
        paused: Whether a later pause was seen to hold.
        before, after: Tokens of one prompt before, and after everything.
    """

    how: Literal["late", "cancelled"]
    error: str
    holds: bool
    paused: bool
    before: Tokens
    after: Tokens


class ObserveSeen(Struct, frozen=True, kw_only=True):
    """Every observation of a run, by the state that the engine was in. `problems`: those that failed or took long."""

    observations: tuple[tuple[str, Observation], ...]
    problems: tuple[str, ...]


GenerationSeen = GenerateSeen | PauseSeen | ResumeSeen | AbortSeen | RepeatSeen | UnansweredSeen
WeightsSeen = FlushSeen | LoadSeen | BadCheckpointSeen | SleepSeen | WakeSeen
Seen = GenerationSeen | WeightsSeen | ProfileSeen | ObserveSeen


class Judgement(Struct, frozen=True):
    """What is wrong, one clause each, empty if nothing is; and what was seen."""

    faults: tuple[str, ...]
    seen: str


def judge(seen: Seen) -> Judgement:
    """Return what is wrong with what was seen."""
    match seen:
        case ProfileSeen():
            counts = " and ".join(str(len(traces)) for traces in seen.traces)
            return Judgement(tuple(_profile(seen)), f"two sessions left {counts} traces, each in its own directory")
        case ObserveSeen():
            return Judgement(tuple(_observe(seen)), f"{len(seen.observations)} observations agree with what was seen")
        case FlushSeen() | LoadSeen() | BadCheckpointSeen() | SleepSeen() | WakeSeen():
            return _judge_weights(seen)
        case _:
            return _judge_generation(seen)


def _judge_generation(seen: GenerationSeen) -> Judgement:
    match seen:
        case GenerateSeen():
            return Judgement(tuple(_generate(seen)), f"the same tokens twice; requests of up to {seen.longest} tokens")
        case PauseSeen():
            return Judgement(tuple(_pause(seen)), _pause_text(seen))
        case ResumeSeen():
            held = seen.refused or f"a held request got {seen.held} of {seen.asked} tokens"
            return Judgement(tuple(_resume(seen)), f"{held}; the next one was served")
        case AbortSeen():
            request = seen.running
            text = f"the running request ended after {request.made} of {request.asked} tokens; the next one was served"
            return Judgement(tuple(_abort(seen)), text)
        case RepeatSeen():
            return Judgement((*seen.errors, *_changed(seen.before, seen.after)), f"{', '.join(seen.calls)}, each twice")
        case UnansweredSeen():
            text = seen.error or "it returned when the request had ended"
            return Judgement(tuple(_unanswered(seen)), f"{text}; later calls were answered")
        case _:
            assert_never(seen)


def _judge_weights(seen: WeightsSeen) -> Judgement:
    match seen:
        case FlushSeen():
            text = "a prompt of old weights was computed anew" if seen.fresh else "accepted; nothing to judge it by"
            return Judgement(tuple(_flush(seen)), text)
        case LoadSeen():
            text = f"tokens followed the checkpoint; labels {', '.join(map(str, seen.labels))}"
            return Judgement(tuple(_load(seen)), text)
        case BadCheckpointSeen():
            text = f"{', '.join(what for what, *_ in seen.answers)}: refused, and the engine serves as before"
            return Judgement(tuple(_bad_checkpoint(seen)), text)
        case SleepSeen():
            return Judgement(tuple(_sleep(seen)), f"asleep, no token; {_memory(seen.used)}")
        case WakeSeen():
            return Judgement(tuple(_wake(seen)), f"the same tokens as before; {_memory(seen.used)}")
        case _:
            assert_never(seen)


# --- generation -------------------------------------------------------------------------------------------------------


def _generate(seen: GenerateSeen) -> Iterator[str]:
    if len(seen.first) < seen.asked:
        yield f"a request of {seen.asked} tokens got {len(seen.first)}"
    if seen.first != seen.again:
        yield "the same prompt had other tokens the second time, so no weights can be told from others"


def _pause(seen: PauseSeen) -> Iterator[str]:
    running = seen.running
    if seen.observed.generating:
        yield "it reports that it still generates"
    if not running.silent:
        yield "tokens kept coming after the pause had returned"
    if seen.late:
        yield f"a request that was sent while it was paused got {seen.late} tokens"
    if seen.counted:
        yield f"its own counter grew by {seen.counted} tokens while it was paused"
    if seen.mode == "abort" and running.made >= running.asked:
        yield f"the running request was not aborted: it got all {running.asked} tokens"
    elif seen.mode == "abort" and not running.ended:
        yield "the running request was not ended"
    if seen.mode == "wait" and not (running.ended and running.made >= running.asked):
        yield f"it did not wait for the running request, which got {running.made} of {running.asked} tokens"
    if seen.mode == "keep" and running.ended:
        yield f"it ended the running request at {running.made} of {running.asked} tokens"
    elif seen.mode == "keep" and running.made < running.asked:
        yield f"the frozen request did not continue: it got {running.made} of {running.asked} tokens"


def _pause_text(seen: PauseSeen) -> str:
    running = seen.running
    if seen.mode == "abort":
        return f"the running request ended after {running.made} of {running.asked} tokens; then no token came"
    if seen.mode == "wait":
        return f"the running request got all {running.asked} tokens; then no token came"
    return f"no token after {running.at_return}; after the resume the request got all {running.asked}"


def _resume(seen: ResumeSeen) -> Iterator[str]:
    if seen.observed.generating is False:
        yield "it reports that it is still paused"
    if seen.held < seen.asked and not seen.refused:
        yield f"a request that was sent during the pause got {seen.held} of {seen.asked} tokens"
    yield from _changed(seen.before, seen.after)


def _abort(seen: AbortSeen) -> Iterator[str]:
    running = seen.running
    if running.made >= running.asked:
        yield f"the running request was not aborted: it got all {running.asked} tokens"
    elif not running.ended:
        yield "the running request was not ended"
    if seen.observed.generating is False:
        yield "it reports that it is paused, which an abort must not do"
    yield from _changed(seen.before, seen.after)


def _changed(before: Tokens, after: Tokens) -> Iterator[str]:
    if len(after) < len(before):
        yield f"afterwards a request got {len(after)} of {len(before)} tokens"
    elif after != before:
        yield "afterwards the same prompt had other tokens"


def _unanswered(seen: UnansweredSeen) -> Iterator[str]:
    if not seen.error and not seen.holds:
        yield "it returned before the running request had ended"
    if not seen.paused:
        yield "the next pause did not hold"
    yield from _changed(seen.before, seen.after)


# --- weights and memory -----------------------------------------------------------------------------------------------


def _flush(seen: FlushSeen) -> Iterator[str]:
    if seen.fresh != seen.reused:
        yield "a prefix that other weights had computed was used again after the flush"


def _load(seen: LoadSeen) -> Iterator[str]:
    first, second, again = seen.tokens
    if first == second:
        yield "both checkpoints gave the same tokens: they were not loaded, or are the same weights"
    if first != again:
        yield "the first checkpoint, loaded again, gave other tokens than before"
    for asked, label in zip(seen.asked, seen.labels, strict=True):
        if label not in (None, asked):
            yield f"version {asked} was loaded, and it reports version {label}"
    if not seen.paused:
        yield "it generates after a load, without a resume"
    one, two, one_again = seen.digests
    if one is not None and (one != one_again or one == two):
        yield "its digest does not follow its weights"


def _bad_checkpoint(seen: BadCheckpointSeen) -> Iterator[str]:
    for what, *answers in seen.answers:
        for call, answer in zip(("check", "load"), answers, strict=True):
            if answer != "CheckpointError":
                yield f"{what}: the {call} {answer}, where CheckpointError is due"
    if seen.relaunched:
        yield "the engine did not survive: another one answers"
    if not seen.label_kept:
        yield "its label changed"
    yield from _changed(seen.before, seen.after)


def _sleep(seen: SleepSeen) -> Iterator[str]:
    if seen.observed.generating:
        yield "it reports that it generates"
    if seen.observed.asleep is not None and seen.observed.asleep != {"weights", "kv_cache"}:
        yield f"it reports as asleep: {', '.join(sorted(seen.observed.asleep)) or 'nothing'}"
    if seen.late:
        yield f"asleep, it made {seen.late} tokens"
    if seen.used is not None and seen.used[1] >= seen.used[0]:
        yield f"no memory was released: {_memory(seen.used)}"


def _wake(seen: WakeSeen) -> Iterator[str]:
    if seen.observed.asleep:
        yield f"it reports as asleep: {', '.join(sorted(seen.observed.asleep))}"
    if seen.late or seen.observed.generating:
        yield "it generates before the resume"
    if seen.used is not None and seen.used[1] <= seen.used[0]:
        yield f"no memory was taken back: {_memory(seen.used)}"
    yield from _changed(seen.before, seen.after)


def _memory(used: tuple[int, int] | None) -> str:
    if used is None:
        return "its memory can't be measured from here"
    return f"memory {used[0]:,} to {used[1]:,} bytes"


# --- profiles and observations ----------------------------------------------------------------------------------------


def _profile(seen: ProfileSeen) -> Iterator[str]:
    if seen.during.profiling is False:
        yield "it reported no session while one was open"
    if seen.afterwards.profiling:
        yield "it reports a session after the stop"
    for directory, traces in zip(seen.directories, seen.traces, strict=True):
        yield from _session(directory, traces)
    if seen.grew:
        yield f"the first session was written to after its stop: {', '.join(seen.grew)}"


def _session(directory: str, traces: Sequence[TraceSeen]) -> Iterator[str]:
    if not traces:
        yield f"the session of {directory} left no trace"
    for trace in traces:
        if trace.bytes_on_disk is None:
            yield f"{trace.path} is reported, and not on the disk"
        elif trace.bytes_on_disk != trace.reported_bytes:
            yield f"{trace.path} has {trace.bytes_on_disk} bytes, and {trace.reported_bytes} are reported"
        elif not trace.readable:
            yield f"{trace.path} holds no events"
        if not trace.path.startswith(f"{directory}/"):
            yield f"{trace.path} is not below {directory}"


def _observe(seen: ObserveSeen) -> Iterator[str]:
    yield from seen.problems
    observations = [observation for _, observation in seen.observations]
    for state, observation in seen.observations:
        if observation.tokenizer != "present":
            yield f"{state}: it reports its tokenizer as {observation.tokenizer}"
            break
    if len({observation.instance for observation in observations}) > 1:
        yield "its `instance` changed, and nobody launched it again"
    if any(observation.operations != observations[0].operations for observation in observations):
        yield "its `operations` changed"
    if not all(observation.operations for observation in observations):
        yield "it lists no operations"
