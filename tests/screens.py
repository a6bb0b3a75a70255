"""The picture of `rolloutctl top` in the documentation, of a fleet that tests look at too.

python -m tests.screens > docs/top.svg
"""

import re
import sys
from io import StringIO

from msgspec.structs import replace
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from controlplane.cli.top_screen import TopView, top_screen
from schemas.agent_status import AgentStatus
from schemas.reports import AgentLine, FleetStatus, RecentFailure

SERVES = AgentStatus(ready=True, tokenizer="present", engine="vLLM 0.32.0", generating=True, version=12)
FOLLOWS = AgentStatus(ready=True, tokenizer="absent", engine="vLLM 0.32.0")
TORN = replace(
    SERVES, ready=False, generating=False, version=11, quarantined=12, trouble="waits for a sync that includes it"
)


def line(agent: str, status: AgentStatus, serving: int | None = None, **changes: object) -> AgentLine:
    host = f"node-{'abcdefghijklmnopqrst'[int(agent[0]) * 2 + int(agent[2])]}"
    plain = AgentLine(
        agent=agent,
        incarnation="i",
        host=host,
        state="live",
        silent_ms=400,
        seq=61,
        status=status,
        serving=serving,
        latency_us=2300,
    )
    return replace(plain, **changes)


FLEET = FleetStatus(
    run="grpo-7b",
    epoch=1,
    seq=61,
    version=12,
    log="run.db",
    agents=(
        line("3.0", TORN, latency_us=8_140_000),
        line("3.1", FOLLOWS, state="gone", away_ms=190_000, silent_ms=0, latency_us=None),
        line("0.0", SERVES, 12, waits_for=("flush (seq 61)",)),
        line("0.1", FOLLOWS),
        line("1.0", SERVES, 12, latency_us=41_700),
        line("1.1", FOLLOWS),
        line("2.0", replace(SERVES, profiling_step=12), 12),
        line("2.1", FOLLOWS),
    ),
    open=("flush (seq 61) waits for 0.0",),
    unproven=(3,),
    failures=(
        RecentFailure(ago_ms=95_000, text="weights v12 committed on replicas 0 … 2; quarantined: replica 3"),
        RecentFailure(
            ago_ms=96_000,
            text="weights load v12 (seq 58): 3.0: failed engine_error: CUDA out of memory; 3.1: missing (gone)",
        ),
    ),
)
FORMAT = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without fonts that a reader's browser would fetch."""


def text(fleet: FleetStatus, view: TopView, width: int, height: int) -> list[str]:
    """The screen as plain lines."""
    out = StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(top_screen(fleet, view, width, height))
    return out.getvalue().splitlines()


def picture(width: int, height: int) -> str:
    console = Console(record=True, file=StringIO(), width=width, height=height, force_terminal=True)
    console.print(top_screen(FLEET, TopView(replica=3), width, height))
    return console.export_svg(title="rolloutctl top", code_format=FORMAT, unique_id="top")


if __name__ == "__main__":
    sys.stdout.write(picture(130, 20))
