"""What roles print reaches the terminal: whole lines, each once, each with its role."""

import asyncio
from pathlib import Path

from launch.processes import relayed
from launch.tails import tell_new
from tests.fakes.runs import Quiet


def test_whole_lines_once(tmp_path: Path) -> None:
    log, told, read = tmp_path / "trainer-0.log", [], {}
    log.write_bytes(b"one\ntw")
    tell_new(tmp_path, read, told.append)
    tell_new(tmp_path, read, told.append)
    assert told == ["trainer: one"]
    (tmp_path / "sampler-1-0.log").write_bytes(b"\xff is no text\n")
    with log.open("ab") as file:
        file.write(b"o\n\nfour\n")
    tell_new(tmp_path, read, told.append)
    assert told[1:] == [
        "sampler-1: \ufffd is no text",
        "trainer: two",
        "trainer: ",
        "trainer: four",
    ]


def test_what_was_there_before_is_not_told_again_and_the_last_line_is(tmp_path: Path) -> None:
    log, quiet = tmp_path / "trainer-0.log", Quiet()
    log.write_text("of an earlier process\n")

    async def main() -> None:
        async with relayed(tmp_path, quiet):
            with log.open("a") as file:
                file.write("last words\n")

    asyncio.run(main())
    assert quiet.notes == ["trainer: last words"]
