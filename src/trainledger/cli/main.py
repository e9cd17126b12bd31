"""`trainledger`: the one place that prints, exits, and catches what nobody else did.

Exit codes: 0 fits, proven or passes; 1 error; 2 usage; 3 does not fit, or no feasible plan; 4 measured disagrees with
predicted, or a baseline is not accepted; 5 `check` found what it was asked about; 130 interrupted; 143 `train` was
asked to end, and saved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from trainledger.cli.verbs import VERBS, Verb

INTERRUPTED = 130
HELP = ("--help", "-h")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    # numpy's OpenBLAS starts a thread per core while it loads; nothing here multiplies matrices of floats.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        return _complain("standard output is closed; open it, or send it to /dev/null", 1)
    try:
        return _guarded(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return 0


def _guarded(tokens: list[str]) -> int:
    from trainledger.errors import TrainledgerError

    try:
        return _dispatch(tokens)
    except TrainledgerError as error:
        return _complain(str(error), error.exit_code, many_lines=error.many_lines)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _complain(f"{error}; check the path, its permissions and the space on the disk", 1)
    except MemoryError:
        return _complain("this machine has too little memory for that; ask for less at once, such as fewer GPUs", 1)
    except Exception as error:  # noqa: BLE001 - the outermost command: a person gets a sentence, whatever broke
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _complain(f"internal error: {reason}; please report it with the command that you ran", 1)


def _complain(message: str, code: int, *, many_lines: bool = False) -> int:
    """One line on standard error, where there is one; what would move the cursor is spelled out."""
    from trainledger.report.plain import spelled

    # a stream that was closed before the start is None, for which print would take standard output
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
        lines = message.splitlines() if many_lines else [message]
        print("error:", "\n".join(map(spelled, lines)), file=sys.stderr)  # noqa: T201 - the command line talks to people
    return code


def _dispatch(tokens: list[str]) -> int:
    for token in tokens:
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in token):
            return _complain(f"{token!r} is not text in UTF-8; write the argument anew", 2)
    if tokens == ["--version"]:
        import trainledger

        sys.stdout.write(f"{trainledger.__version__}\n")
        return 0
    verb = _verb(tokens)
    asked = any(token in HELP for token in tokens)
    kind = _kind(tokens)
    if not tokens or (asked and (verb is not None or tokens[0] in HELP or kind)):
        return _help(verb, kind)
    if kind and tokens == [kind[0].words[0]]:
        words = ", ".join(one.words[1] for one in kind)
        return _complain(f"{tokens[0]} does one of several things; write one of {words} after it", 2)
    return _run(verb, tokens)


def _verb(tokens: list[str]) -> Verb | None:
    return next((verb for verb in VERBS if verb.words == tuple(tokens[: len(verb.words)])), None)


def _kind(tokens: list[str]) -> tuple[Verb, ...]:
    """Verbs of two words whose first one was typed."""
    return tuple(verb for verb in VERBS if len(verb.words) > 1 and tokens and verb.words[0] == tokens[0])


def _help(verb: Verb | None, kind: tuple[Verb, ...]) -> int:
    from trainledger.cli.help import of_verb, overview
    from trainledger.cli.show import write

    write(of_verb(verb) if verb is not None else overview(kind or VERBS))
    return 0


def _run(verb: Verb | None, tokens: list[str]) -> int:
    """Parse the flags of one verb and run it; cyclopts knows the others by name, to say which was nearly meant."""
    from cyclopts import App, CycloptsError

    from trainledger.cli.command import command
    from trainledger.errors import UsageError

    app = App(name="trainledger", help_flags=(), version_flags=(), result_action="return_value")
    kinds: dict[str, App] = {}
    for known in VERBS:
        *kind, name = known.words
        if kind and kind[0] not in kinds:
            app.command(kinds.setdefault(kind[0], App(name=kind[0], help_flags=(), version_flags=())))
        under = kinds[kind[0]] if kind else app
        if known is verb:
            under.command(command(known.service.Request, _act(known)), name=name)
        else:
            under.command(App(name=name, help_flags=(), version_flags=()))
    try:
        return int(app(tokens, exit_on_error=False, print_error=False))
    except CycloptsError as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{text} See `trainledger {f'{verb.name} ' if verb else ''}--help`.") from None


def _act(verb: Verb) -> Callable[[object, bool], int]:
    def act(request: object, as_json: bool) -> int:
        from trainledger.cli.show import show

        with _progress(verb, as_json=as_json) as heard:
            response = verb.service.run(request, **heard)
        show(response, verb.report, as_json=as_json)
        return response.exit_code

    return act


@contextmanager
def _progress(verb: Verb, *, as_json: bool) -> Generator[dict[str, object]]:
    """What a verb that takes its time is given to say how far it is: at a terminal alone, and not beside JSON."""
    # a stream that was closed before the start is None
    if not verb.runs or as_json or sys.stderr is None or not sys.stderr.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        yield {}
        return
    from trainledger.report.progress import progress

    with progress(sys.stderr) as heard:
        yield {"progress": heard}


def _close_stdout() -> None:
    """Whoever read us is gone: let the interpreter's last flush go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
