"""The admin API of what is asked of a conversation: compact, undo, bypass, pin."""

from dataclasses import asdict

from fastapi import Response

from compaction_proxy.admin.api.routing import Steers, answer, routes
from compaction_proxy.admin.api.schemas import (
    Bypass,
    Marked,
    NewPin,
    Pins,
    ProjectInstructions,
    Round,
    instructions_shape,
    pins_shape,
    round_shape,
)

router = routes()


@router.post("/conversations/{conversation}/compact", status_code=202, response_model=Marked)
async def _compact(conversation: str, steering: Steers) -> Response:
    """Have the conversation's next request compacted."""
    await steering.compact(conversation)
    return answer(asdict(Marked(conversation)), 202)


@router.post("/conversations/{conversation}/undo", response_model=Round)
async def _undo(conversation: str, steering: Steers) -> Response:
    """Take the newest round back. No other is made until one is forced, or the request would not fit."""
    return answer(asdict(round_shape(await steering.undo(conversation), undone=True)))


@router.post("/conversations/{conversation}/bypass", response_model=Bypass)
async def _bypass(conversation: str, steering: Steers) -> Response:
    """Have the conversation's requests go on as they come; what is stored of it stays."""
    await steering.bypass(conversation)
    return answer(asdict(Bypass(conversation, bypass=True)))


@router.post("/conversations/{conversation}/resume", response_model=Bypass)
async def _resume(conversation: str, steering: Steers) -> Response:
    """Have the conversation's requests compacted again."""
    await steering.resume(conversation)
    return answer(asdict(Bypass(conversation, bypass=False)))


@router.get("/conversations/{conversation}/pins", response_model=Pins)
async def _pins(conversation: str, steering: Steers) -> Response:
    """The texts that no round may lose."""
    return answer(asdict(Pins(pins_shape(await steering.pins(conversation)))))


@router.post("/conversations/{conversation}/pins", status_code=201, response_model=Pins)
async def _pin(conversation: str, pin: NewPin, steering: Steers) -> Response:
    """Pin a text."""
    return answer(asdict(Pins(pins_shape(await steering.pin(conversation, pin.text)))), 201)


@router.delete("/conversations/{conversation}/pins/{pin}", response_model=Pins)
async def _unpin(conversation: str, pin: str, steering: Steers) -> Response:
    """Let go of a pinned text."""
    await steering.unpin(conversation, pin)
    return answer(asdict(Pins(pins_shape(await steering.pins(conversation)))))


@router.get("/conversations/{conversation}/instructions", response_model=ProjectInstructions)
async def _instructions(conversation: str, steering: Steers) -> Response:
    """What the client says of its project, such as a CLAUDE.md: no round takes it."""
    wishes = await steering.instructions(conversation)
    return answer(asdict(ProjectInstructions(instructions_shape(wishes))))


@router.delete("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _remove_instruction(conversation: str, instruction: str, steering: Steers) -> Response:
    """Leave instructions out of requests that are rewritten."""
    await steering.remove_instruction(conversation, instruction)
    return await _instructions(conversation, steering)


@router.post("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _restore_instruction(conversation: str, instruction: str, steering: Steers) -> Response:
    """Keep instructions again that were left out."""
    await steering.remove_instruction(conversation, instruction, removed=False)
    return await _instructions(conversation, steering)
