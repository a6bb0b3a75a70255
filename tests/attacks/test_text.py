"""Text of others that a terminal or a browser would act on: it is shown everywhere, and acts nowhere."""

import io
import json
import logging
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from rich.console import Console

from controlplane.bus.bus import Bus
from controlplane.cli.__main__ import cli
from controlplane.cli.engine import probe_lines
from controlplane.cli.tables import fleet_table
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.page import write_page
from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, Target
from schemas.config import BusConfig
from schemas.formatting import Printable, json_text, markup, one_line, printable
from schemas.identity import Identity
from schemas.logs import logger_of
from schemas.outcomes import Acted, ErrorKind, Failed, Trace
from schemas.reports import FleetStatus
from schemas.transport.sockets import Context, agent_dealer
from workers.engines.probe import Probed

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

HOSTILE = "[red]x[/] [link=http://evil]y[/link]\x1b[2J\x1b]0;owned\x07\x9b31m\r\n\u2028ok\u202edesrever\u2066\0<script>alert(1)</script>\\"
PAUSE = EngineCommand(operation="pause")


def harmless(text: str) -> bool:
    """Whether a terminal only prints it: no control character, no escape, no turned direction."""
    return all(char.isprintable() or char == "\n" for char in text)


def rendered(thing: object) -> str:
    """What rich writes to a terminal without colours."""
    out = io.StringIO()
    Console(file=out, width=300, color_system=None, force_terminal=True, legacy_windows=False).print(thing)
    return out.getvalue()


def all_of_it(thing: Printable) -> list[str]:
    return [str(thing), rendered(thing), thing._repr_html_()]


def test_the_functions_that_make_text_harmless() -> None:
    assert harmless(one_line(HOSTILE)) and "\n" not in one_line(HOSTILE)
    assert harmless(printable(HOSTILE)) and printable(HOSTILE).count("\n") == 1
    assert one_line("half \ud800") == "half  " and one_line("plain …") == "plain …"
    shown = rendered(markup(HOSTILE))
    assert "[red]x[/] [link=http://evil]y[/link]" in shown and harmless(shown)
    assert rendered(f"[red]{markup('path' + chr(92))}[/red]") == "path\\\n"


def test_json_that_is_printed_holds_the_same_and_does_nothing() -> None:
    told = {"text": f"{HOSTILE}\U000e0001 ü \U0001f600"}
    shown = json_text(told)
    assert shown.isprintable() and json.loads(shown) == told and "ü \U0001f600" in shown
    commands = (Path(__file__).parents[2] / "controlplane" / "cli").glob("*.py")
    assert [path.name for path in commands if "msgspec.json.encode(" in path.read_text("utf-8")] == []


def test_a_line_of_a_log_can_not_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logger_of("test").info("host %s says %s", HOSTILE, "a\n2030-01-01 INFO everything is fine")
    assert harmless(caplog.messages[0]) and "\n  2030-01-01 INFO" in caplog.messages[0]
    assert logger_of("test").filters == logger_of("test").filters[:1]


async def test_whatever_an_agent_says_of_itself_is_shown_and_does_nothing(
    tmp_path: Path, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent whose host, engine and answers are hostile, in the status, reports, log and page of its run."""
    config = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=60_000)
    async with (
        Bus("tcp://127.0.0.1:0", RunLog.open(tmp_path / "run.db"), config, context=context) as bus,
        agent_dealer(context, bus.address) as agent,
    ):
        identity = Identity(replica=0, node_rank=0)
        hello = wire.Hello(identity=identity, incarnation="a", journal="j", host=HOSTILE, pid=1)
        status = AgentStatus(ready=False, tokenizer="present", engine=HOSTILE, activity=HOSTILE)
        for message in (hello, wire.Join(), status):
            await agent.send([wire.encode_header(1), wire.encode(message)])
        with anyio.fail_after(10):
            await bus.wait_until(lambda state: any(member.status is not None for member in state.members.values()))
        first, second = bus.publish(PAUSE, Target(), 10_000), bus.publish(PAUSE, Target(), 10_000)
        with anyio.fail_after(10):
            await bus.wait_until(lambda state: state.seq == 3)
        traces = (Trace(path=HOSTILE, nbytes=1, sha256=HOSTILE),)
        for seq, outcome in ((2, Failed(ErrorKind.ENGINE_ERROR, HOSTILE)), (3, Acted(calls=(HOSTILE,), traces=traces))):
            answer = wire.CommandOutcome(outcome=outcome, rule=10)
            await agent.send([wire.encode_header(1, 1, seq), wire.encode(answer)])
        with anyio.fail_after(10):
            reports = [await first, await second]
        fleet = bus.status()
    shown = [rendered(fleet_table(fleet)), *all_of_it(fleet)]
    shown += [text for report in reports for text in all_of_it(report)]
    page = io.StringIO()
    write_page(page, collect(RunLog.read(tmp_path / "run.db")), HOSTILE, HOSTILE)
    for command in (["log", "show"], ["log", "verify"], ["log", "show", "--json"], ["log", "verify", "--json"]):
        shown.append(CliRunner().invoke(cli, [*command, str(tmp_path / "run.db")]).output)
    assert all(harmless(text) for text in (*shown, *caplog.messages, page.getvalue()))
    assert "<script>alert" not in page.getvalue() and "[link=http://evil]" in shown[0]


def test_what_a_probed_server_says_is_shown_and_does_nothing() -> None:
    found = Probed(url=HOSTILE, kind="vllm", version=HOSTILE, model=HOSTILE, note=HOSTILE)
    shown = "\n".join(probe_lines(found))
    assert harmless(shown) and "[red]x" in shown


def test_an_error_that_quotes_others_does_nothing() -> None:
    result = CliRunner().invoke(cli, ["log", "show", f"/{HOSTILE[:60]}"])
    assert harmless(result.output)
    status = FleetStatus(run=HOSTILE, epoch=1, seq=1, version=0, log=HOSTILE, agents=(), open=(HOSTILE,))
    assert all(harmless(text) for text in all_of_it(status))


def test_every_logger_of_ours_writes_harmless_lines() -> None:
    root = Path(__file__).parents[2]
    sources = (path for part in ("schemas", "controlplane", "workers") for path in (root / part).rglob("*.py"))
    found = {str(path.relative_to(root)) for path in sources if "logging.getLogger(" in path.read_text("utf-8")}
    own_colours = {"controlplane/bus/binding.py"}
    assert found == own_colours | {"schemas/logs.py"}, "make loggers with schemas.logs.logger_of"
