"""What arrives is checked before it is used: who may say what, numbers in range, models of the right size, finite, not too large."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedbcd.engines.deploy.letter import Letter
from fedbcd.engines.deploy.parts import parts
from fedbcd.errors import ConfigError, RemoteProtocolError
from fedbcd.protocol.messages import Actor, Event

STORE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
MOST = 1 << 53  # of any counter: beyond, JSON readers and float clocks go astray


class CheckFailed(RemoteProtocolError):
    """A letter is turned down and has changed nothing; `reason` is one word, for counters."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """How far a peer may go."""

    norm: float | None = None  # of a model that arrives; None: any that is finite
    beyond_norm: Literal["warn", "refuse"] = "warn"
    ahead_s: float = 86_400.0  # how far a peer's clock may be ahead of ours

    def __post_init__(self) -> None:
        if self.norm is not None and not 0 < self.norm < math.inf:
            raise ConfigError(f"norm={self.norm} must be a finite number above 0; leave it out for no bound")
        if self.beyond_norm not in ("warn", "refuse"):
            raise ConfigError(f"beyond_norm={self.beyond_norm!r} must be 'warn' or 'refuse'")
        if not self.ahead_s > 0:
            raise ConfigError(f"ahead_s={self.ahead_s} must be above 0")


def check_sender(letter: Letter, me: Actor, allowed: Mapping[type[Event], Callable[[Event], Actor]]) -> None:
    """Whether this letter is for me, is of a kind that I take from the network, and comes from the one who may say so."""
    if letter.to != me:
        raise CheckFailed("address", f"{letter.sender} sent a letter for {letter.to} to {me}")
    speaker = allowed.get(type(letter.event))
    if speaker is None:
        raise CheckFailed("event", f"{me} takes no {type(letter.event).__name__} from the network")
    if speaker(letter.event) != letter.sender:
        raise CheckFailed("identity", f"{letter.sender} sent {letter.event}, which only {speaker(letter.event)} may say")


def check_run(peer: Actor, hello: Mapping[str, Any], facts: Mapping[str, str]) -> None:
    """Whether a peer belongs to the same deployment: the same settings, members and initial model."""
    if hello.get("run") != facts["run"]:
        same = f"start it with the same file, where the algorithm is {facts['algorithm']}"
        raise CheckFailed("run", f"{peer} belongs to a deployment with other settings, members or model; {same}")


def is_counter(value: object) -> bool:
    """Whether what a peer says of itself is a counter."""
    return type(value) is int and 0 <= value < MOST


def is_store_id(value: object) -> bool:
    """Whether what a peer says of itself is the name of a store."""
    return isinstance(value, str) and STORE_ID.fullmatch(value) is not None


def check_notice(sender: Actor, body: Mapping[str, Any], *counters: str) -> None:
    """Whether a notice holds these counters (-1 stands for none yet) and, if it tells how long ago or who belongs, what can be."""
    elapsed, members = body.get("elapsed", 0.0), body.get("members", [])
    wrong = [name for name in counters if not (is_counter(body.get(name)) or body.get(name) == -1)]
    wrong += [] if isinstance(members, list) and all(map(is_counter, members)) else ["members"]
    if wrong or not (type(elapsed) in (int, float) and 0 <= elapsed < MOST):
        raise CheckFailed("notice", f"{sender} gave a notice that cannot be: {body!r:.200}")


def check_numbers(event: Event) -> None:
    """Whether every counter of an event is in range."""
    names: tuple[str, ...] = type(event).__slots__
    for name in names:
        value = getattr(event, name)
        if isinstance(value, int) and not 0 <= value < MOST:
            raise CheckFailed("range", f"{type(event).__name__} has {name}={value}; it must be from 0 to 2^53 - 1")


def check_clock(sent: float, now: float, limits: Limits) -> None:
    """Whether a peer's clock is believable: one from the far future would carry ours along for ever."""
    if not (math.isfinite(sent) and sent <= now + limits.ahead_s):
        raise CheckFailed("clock", f"the letter was sent at {sent}, but here it is {now}; a peer may be ahead by {limits.ahead_s:g} s")


def check_model(model: Tensor | None, size: int, dtype: torch.dtype, limits: Limits) -> str | None:
    """Refuse a model that cannot be used; returns a sentence about one that is merely large."""
    if model is None:
        raise CheckFailed("model", f"the letter has no model; {size} values of {dtype} belong to it")
    if model.dtype != dtype or tuple(model.shape) != (size,):
        raise CheckFailed("shape", f"the model has shape {tuple(model.shape)} of {model.dtype}; it must be ({size},) of {dtype}")
    for part in parts(size):
        if not bool(torch.isfinite(model[part]).all()):
            place = part.start + int((~torch.isfinite(model[part])).nonzero()[0])
            raise CheckFailed("finite", f"value {place} of the model is {float(model[place])}; all must be finite")
    if limits.norm is None:
        return None
    norm = float(torch.linalg.vector_norm(model, dtype=torch.float64))
    if norm <= limits.norm:
        return None
    sentence = f"the model has norm {norm:g}, above the bound {limits.norm:g}"
    if limits.beyond_norm == "refuse":
        raise CheckFailed("norm", sentence)
    return sentence
