"""How a replica of ``ftopt launch`` ends: it writes so to a file, and ends with status 2 after a mistake of the user's.

`ftopt` imports this; processes that no launcher has started are not affected.
"""

import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ftopt.common.paths import replace_text
from ftopt.common.whose import is_users
from ftopt.errors import FtoptError, Unreachable, UserError

END = "FTOPT_END"
"""The environment variable that names the file."""


def tell_end(**how: object) -> None:
    """Writes how this replica ends, beside what was written before: ``early``, whether it leaves before the end of its
    script; why its job was ``over``; its own inner ``steps`` and those ``pending``; the ``version`` and ``inner_step``
    that it has reached; the folder of its ``checkpoints``, and whether its script ``resumes`` them; the user's
    ``mistake`` that ends it; the type and the ``place`` of any other ``error``."""
    if name := os.environ.get(END):
        with suppress(OSError):  # the ranks of an island share the file
            replace_text(Path(name), json.dumps(read_end(Path(name)) | how))


def read_end(path: Path) -> dict[str, Any]:
    """What `tell_end` has written last; empty: nothing, or the file is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_before = sys.excepthook


def _without_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A hook for uncaught exceptions: a `UserError` becomes one message with the user's own line, and exit status 2,
    after which the launcher does not start the script again. Not where nothing answers, which may pass."""
    own = [x for x in traceback.extract_tb(trace) if is_users(x.filename)]
    place = f"\n    at {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    if not isinstance(error, UserError) or isinstance(error, Unreachable):
        # FtoptErrors follow from other failures; an OSError, as of storage or of a network, may pass.
        if isinstance(error, Exception) and not isinstance(error, FtoptError | OSError):
            tell_end(error=kind.__qualname__, place=place)
        _before(kind, error, trace)
        return
    print(f"ftopt: {error}{place}", file=sys.__stderr__, flush=True)  # torch.distributed's hook takes sys.stderr
    tell_end(mistake=str(error))
    raise SystemExit(2)


if os.environ.get(END):
    sys.excepthook = _without_traceback
