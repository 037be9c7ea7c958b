"""The function at the end of a run: the webhook of the objective's README, and one that fails after Ctrl-C."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from acceptance.commands import Desk
from services.documents import text_of

pytestmark = pytest.mark.timeout(120)

BLOCKS = re.findall(r"^```python\n(.*?)^```", text_of("objective"), re.MULTILINE | re.DOTALL)
[RECIPE] = [block for block in BLOCKS if "on_end" in block]


def test_the_recipe_sends_one_message_and_json_stays_whole(desk: Desk) -> None:
    messages: list[tuple[str | None, bytes]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            messages.append((self.headers["Content-Type"], body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    desk.study(seconds=0.0)
    path = desk.folder / "my_study.py"
    path.write_text(f"{path.read_text()}\n{RECIPE}    print('told', study.state)\n")
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        try:
            run = desk.launch("my_study", "--trials", "3", "--workers", "cpu=1", "--json", HOOK_URL=url).wait(60)
        finally:
            server.shutdown()
            thread.join()
    assert run.code == 0, desk.said()
    found = run.json()
    assert "told ended" in run.err
    [(kind, body)] = messages
    text = f"study {found['study']}: 3 trials have ended; best loss {found['best']['loss']}"
    assert (kind, json.loads(body)) == ("application/json", {"text": text})


def test_after_ctrl_c_one_that_raises_is_a_warning_and_the_exit_code_stays(desk: Desk) -> None:
    desk.study(seconds=0.3)
    path = desk.folder / "my_study.py"
    path.write_text(f"{path.read_text()}\ndef on_end(study, why):\n    raise ValueError(why)\n")
    run = desk.launch("my_study", "--trials", "100", "--workers", "cpu=1")
    desk.await_runs(1, "ended")
    run.interrupt()
    run.wait(60)
    assert run.code == 0, desk.said()
    [line] = [line for line in run.err.splitlines() if "on_end" in line]
    assert line.startswith("Warning: on_end failed: ValueError: stopped by SIGINT (")
    desk.nothing_left()
