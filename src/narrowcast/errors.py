"""One exception class per thing a caller catches; the facts are fields, the text has four parts.

Every error says what was asked, what was found, where, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A place in a file: where a rule was written or a line of the user's program."""

    file: str
    line: int = 0
    note: str = ""

    def __str__(self) -> str:
        site = f"{self.file}:{self.line}" if self.line else self.file
        return f"{site}  {self.note}" if self.note else site


class NarrowcastError(Exception):
    """Base of every error that Narrowcast raises on purpose.

    Fields: `asked` (what the caller wanted), `found` (what stood in the way), `where` (places, possibly none),
    `advice` (what to do).
    """

    def __init__(self, asked: str, found: str = "", where: tuple[Origin, ...] = (), advice: str = "") -> None:
        self.asked = asked
        self.found = found
        self.where = where
        self.advice = advice
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message as text: asked, found, one indented line per place, advice."""
        lines = [f"{self.asked}: {self.found}" if self.found else self.asked]
        lines += [f"  {site}" for site in self.where]
        if self.advice:
            lines.append(f"  {self.advice}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.asked, self.found, self.where, self.advice)


def first_line(error: BaseException | None) -> str:
    """Return an error's first line, short: `RuntimeError: both inputs should have same dtype`."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def reason_of(error: Exception) -> str:
    """Return why a file could not be read or written: in the system's words, `no such file or directory`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    if isinstance(error, UnicodeDecodeError):
        return f"not text: {error}"
    kind = type(error).__name__
    return f"not JSON: {error}" if kind == "JSONDecodeError" else f"{kind}: {error}"


class FormatError(NarrowcastError, ValueError):
    """A format is unknown, or has no meaning where it was given."""


class PolicyError(NarrowcastError, ValueError):
    """A policy or a rule is malformed: unknown key, unknown action, a file that does not parse."""


class PolicyConflictError(PolicyError):
    """Two rules of equal specificity in one layer disagree about an op."""


class UnknownOpError(PolicyError):
    """A rule names an op that neither PyTorch nor a loaded library registers."""


class RegionError(NarrowcastError, ValueError):
    """An autocast region cannot be opened as asked: device type, dtype or policy."""


class RegionWarning(UserWarning):
    """A region does what was asked, in a way that its policy is not for."""


class RefusedError(NarrowcastError, RuntimeError):
    """The policy refuses to run this call (action `refuse`, or formats that have no common one)."""


class TargetError(NarrowcastError):
    """The command line's TARGET cannot be imported or has no usable `case()`."""


class ProgramError(NarrowcastError, ValueError):
    """A program, or an edit of one, is not well formed; or program text does not parse."""


class CaptureError(NarrowcastError, RuntimeError):
    """A graph cannot be captured as asked; what could not be captured runs as native autocast would run it."""


class BackwardError(NarrowcastError, RuntimeError):
    """A compiled backward runs under another autocast state than the one that it was compiled for."""


class ScriptError(NarrowcastError, RuntimeError):
    """A script cannot be given explicit casts: what, where in the user's file, and what to write instead."""


class ScriptWarning(UserWarning):
    """A script was given explicit casts, but something in it does not do what it seems to."""


class PinError(NarrowcastError, ValueError):
    """A module or function cannot be pinned, or unpinned, as asked."""


class CacheError(NarrowcastError, RuntimeError):
    """The weight cache was asked for what it cannot do, or a checksum found a weight that was changed unseen."""


class EnergyError(NarrowcastError, ValueError):
    """Formats cannot be placed: costs that make no sense, or a program in which every placement is forbidden."""


class ProfileError(NarrowcastError, ValueError):
    """A profile of costs cannot be read, written or used as asked."""


class GoalError(NarrowcastError, ValueError):
    """A goal, or what goes with it, is not one that there is."""


class RunError(NarrowcastError, ValueError):
    """A run of a model cannot be captured, compared, read or written as asked."""


class NotFiniteError(NarrowcastError, ArithmeticError):
    """A watched run made a NaN or an infinity, and was to stop there."""


class ScalerError(NarrowcastError, RuntimeError, AssertionError):
    """A scaler was used in an order, or with values, that would ruin a step; torch's own raises one of both others."""


class ScalerWarning(UserWarning):
    """A scaler works, and something about it is probably a mistake; or its steps are skipped again and again."""


class SnapshotError(NarrowcastError, ValueError):
    """A snapshot of formats cannot be read or compared: broken, cut off, or of another device or torch."""


class CheckError(NarrowcastError, AssertionError):
    """What a test holds does not hold: formats, casts, front ends or numbers are not as they were."""


class CheckWarning(UserWarning):
    """A test holds less than it might: a front end cannot be taken, and was not asked for by name."""


class TrainingError(NarrowcastError, RuntimeError):
    """A plugin cannot do in a framework's loop what was asked: the framework is missing, or autocasts itself."""


class TrainingWarning(UserWarning):
    """Training goes on under another precision than its checkpoint's, or its watch found a NaN or an infinity."""


class SurfaceError(NarrowcastError, RuntimeError):
    """This torch is not as Narrowcast takes it to be: which assumption does not hold, and for which version."""


def with_origin(error: NarrowcastError, origin: Origin) -> NarrowcastError:
    """Return the same error with its place, for errors raised before the place was known."""
    return type(error)(error.asked, error.found, error.where or (origin,), error.advice)
