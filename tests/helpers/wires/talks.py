"""Conversations that no wire knows yet: what is said, asked and found, request by request.

Hypothesis draws shapes only; every text gets its words from where it stands, so that none is there twice.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

# A picture of one pixel, and as many bytes behind it as one of a screen has at least: pictures are priced by
# tokens, whatever their bytes.
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PICTURE = b64encode(b64decode(_PIXEL) + bytes(6_000)).decode()
FILLING = ("the", "größte", "part", "of", "it", "is", "as", "it", "was", "before", "and", "nothing", "else")
INSTRUCTIONS = "You mend programs. Never touch the file prod.env."


@dataclass(frozen=True, slots=True)
class Use:
    """A tool called once.

    Attributes:
        words: Of what it gives.
        custom: Whether it takes plain text, on wires that have such tools.
        pictured: Whether it gives a picture, too, on wires where tools can.
    """

    words: int
    custom: bool = False
    pictured: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the model.

    Attributes:
        words: Of what it says; 0 where it only calls.
        uses: The tools it calls.
        reasoned: Whether what it thought comes with it, signed.
        searched: Whether the provider searched the web on the way.
        reminded: Whether the client says something beside the results.
    """

    words: int
    uses: tuple[Use, ...] = ()
    reasoned: bool = False
    searched: bool = False
    reminded: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What follows from one thing that the user says.

    Attributes:
        words: Of what the user says.
        pictured: Whether a picture comes with it.
        told: Whether a privileged message stands before it, on wires that have any in the list.
        steps: What the model does; calls of the last one mean that the user has broken in.
        unanswered: Calls of that last one that have no result.
    """

    words: int
    pictured: bool = False
    told: bool = False
    steps: tuple[Step, ...] = ()
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, and how its client writes.

    Attributes:
        turns: Of the last one only what the user says is asked.
        reused: Whether ids of calls come again, on wires that allow it.
        spaced: Whether there is white space in the JSON.
        escaped: Whether its strings are ASCII.
        prefilled: Whether the last request ends in the beginning of the answer.
    """

    turns: tuple[Turn, ...]
    reused: bool = False
    spaced: bool = False
    escaped: bool = False
    prefilled: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A call, as it is written.

    Attributes:
        id: Its id where every call has its own.
        reused: Its id where they come again.
        path: What it is called with; nothing else has it.
        result: What it gives.
    """

    id: str
    reused: str
    path: str
    result: str
    use: Use


@dataclass(frozen=True, slots=True)
class Told:
    """A privileged message in the list."""

    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The user says something; `beside` results in the same breath, or by itself."""

    text: str
    pictured: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The model answers.

    Attributes:
        text: What it says.
        calls: What it calls.
        thought: What it thought, as only its provider can read it; empty if nothing is sent of it.
        searched: Its search in the web; or empty.
        begun: Whether this is the beginning of an answer, for the model to go on with.
    """

    text: str
    calls: tuple[Made, ...] = ()
    thought: str = ""
    searched: str = ""
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """What calls have given."""

    calls: tuple[Made, ...]


Moment = Told | Asked | Answered | Returned


def _text(name: str, words: int) -> str:
    if not words:
        return ""
    return " ".join([f"{name}:", *(FILLING[(len(name) + k) % len(FILLING)] for k in range(words))])


def _calls(name: str, step: Step) -> Iterator[Made]:
    for number, use in enumerate(step.uses):
        here = f"{name}.{number}"
        result = _text(f"found {here}", use.words)
        yield Made(f"call_{here.replace('.', '_')}", f"call_{number}", f"src/{here}/end.py", result, use)


def _step(name: str, step: Step, unanswered: int) -> Iterator[Moment]:
    calls = tuple(_calls(name, step))
    text = _text(f"answer {name}", step.words if calls else max(1, step.words))
    thought = f"thought+{name}+sealed" if step.reasoned else ""
    yield Answered(text, calls, thought, f"search {name}" if step.searched else "")
    if returned := calls[: len(calls) - unanswered]:
        yield Returned(returned)
        if step.reminded:
            yield Asked(f"reminder {name}: the list of what is to be done is empty", beside=True)


def _turn(number: int, turn: Turn, *, last: bool) -> Iterator[Moment]:
    if turn.told:
        yield Told(f"rule {number}: write tests first")
    yield Asked(_text(f"question {number}", turn.words), turn.pictured)
    for at, step in enumerate(() if last else turn.steps):
        ending = at == len(turn.steps) - 1
        yield from _step(f"{number}.{at}", step, turn.unanswered if ending else 0)


def moments(talk: Talk) -> list[Moment]:
    """All that happens, in order, up to the last thing that the user says."""
    final = len(talk.turns) - 1
    made = [each for k, turn in enumerate(talk.turns) for each in _turn(k, turn, last=k == final)]
    return [*made, Answered("Well, this", begun=True)] if talk.prefilled else made


def requests(talk: Talk) -> Iterator[list[Moment]]:
    """What each request holds: the model is asked after the user has spoken, and after results."""
    made = moments(talk)
    for stop in range(1, len(made) + 1):
        following = made[stop] if stop < len(made) else None
        answering = isinstance(following, Answered) and not following.begun
        if following is None or answering:
            yield made[:stop]


def last_said(held: Sequence[Moment]) -> Asked:
    """What the user has said last."""
    return [each for each in held if isinstance(each, Asked)][-1]


def bound(held: Sequence[Moment]) -> list[list[str]]:
    """What must stay together or go together: thoughts, and all calls up to the next one that came of them.

    Nothing that a user or an instruction says stands between.
    """
    groups: list[list[str]] = []
    going = False
    for each in held:
        if isinstance(each, Answered):
            going = bool(each.thought or going) and bool(each.calls)
            if each.thought:
                groups.append([each.thought])
            if going:
                groups[-1] += [call.path for call in each.calls]
        elif not isinstance(each, Returned):
            going = False
    return groups


# Mostly small; some alone fill a window.
WORDS = st.sampled_from((1, 6, 30, 30, 90, 200))
RESULTS = st.sampled_from((0, 3, 30, 120, 120, 400, 1_500))
SELDOM = st.sampled_from((False, False, False, False, True))
USES = st.lists(st.builds(Use, RESULTS, SELDOM, SELDOM), max_size=3).map(tuple)
STEPS = st.builds(Step, st.sampled_from((0, 5, 40, 150)), USES, st.booleans(), SELDOM, SELDOM)


def _ended(turn: Turn) -> Turn:
    """The turn with a last step as most have it, which calls nothing, unless the user breaks in."""
    calling = tuple(step for step in turn.steps if step.uses)
    if not turn.unanswered or not calling:
        return replace(turn, steps=(*calling, Step(20)), unanswered=0)
    return replace(turn, steps=calling, unanswered=min(len(calling[-1].uses), turn.unanswered - 1))


TURNS = st.builds(
    Turn,
    WORDS,
    SELDOM,
    SELDOM,
    st.lists(STEPS, max_size=4).map(tuple),
    st.sampled_from((0, 0, 0, 0, 0, 1, 2, 3)),
).map(_ended)
TALKS = st.builds(
    Talk,
    st.lists(TURNS, min_size=4, max_size=9).map(tuple),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SELDOM,
)
