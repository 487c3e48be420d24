"""A headless Chromium, driven over its DevTools protocol: open a page, evaluate, press keys, take pictures.

`async with Browser() as browser:` starts one with an empty profile; `await browser.open(url)` gives a page
that notes every error, failed request and breach of the content security policy in `trouble`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers, where Chromium's sandbox cannot
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27}
_NOTE_BREACHES = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())
        self.trouble: list[str] = []

    async def prepare(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")
        await self.ask("Page.addScriptToEvaluateOnNewDocument", source=_NOTE_BREACHES)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises RuntimeError with the browser's own words."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(30):
            return await answer

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise. Raises RuntimeError if it throws."""
        told = await self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(str(told["exceptionDetails"])[:2000])
        return told["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 20.0) -> None:
        """Until the expression is true. Polls: what is waited for happens in another process."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.evaluate(f"Boolean({condition})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never true: {condition}; trouble: {self.trouble}") from None

    async def click(self, selector: str) -> None:
        await self.until(f"document.querySelector({json.dumps(selector)})")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector: str, text: str) -> None:
        node = f"document.querySelector({json.dumps(selector)})"
        await self.evaluate(f"{node}.value = {json.dumps(text)}; {node}.dispatchEvent(new Event('input'))")

    async def press(self, key: str) -> None:
        """A printable key, Enter, Tab or Escape."""
        code = _KEY_CODES.get(key)
        text = {"text": "\r" if key == "Enter" else key} if code in (None, 13) else {}
        numbers = {} if code is None else {"windowsVirtualKeyCode": code, "code": key}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **numbers)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, **numbers)

    async def text(self, selector: str = "body") -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would have it."""
        await self.ask(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def picture(self, path: Path, *, is_whole: bool = False) -> None:
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(RuntimeError(str(data["error"])))
                else:
                    answer.set_result(data["result"])
            else:
                self._note(data["method"], data["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.trouble.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.trouble.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.trouble.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


class Browser:
    """Owns the process and its profile."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="homing-browser-", ignore_cleanup_errors=True)
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._pages: list[Page] = []
        self._base_url = ""

    async def __aenter__(self) -> Self:
        assert PROGRAM is not None
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._http = aiohttp.ClientSession()
        async with asyncio.timeout(START_TIMEOUT_S):
            self._base_url = await self._find_port()
        return self

    async def _find_port(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            if "DevTools listening on ws://" in line:
                return "http://" + line.split("ws://")[1].split("/")[0]
        raise RuntimeError("Chromium ended before it listened")

    async def open(self, url: str) -> Page:
        """A new page with this address."""
        assert self._http is not None
        async with self._http.put(f"{self._base_url}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        page = Page(await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        self._pages.append(page)
        await page.prepare()
        await page.open(url)
        return page

    async def __aexit__(self, *exc_info: object) -> None:
        for page in self._pages:
            await page.close()
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.communicate()
        self._profile.cleanup()
