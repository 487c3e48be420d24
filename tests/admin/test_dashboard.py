"""The dashboard: its files and their headers, and the page in a real browser against a live gateway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.browser import PROGRAM, Browser, Page
from fakes.caching_engine import caching_answer
from fakes.gateway_world import GatewayWorld

import gateway.admin.dashboard_files as dashboard_files

DIRECTORY = Path(dashboard_files.__file__).parent / "dashboard"
SYSTEM = {"role": "system", "content": "You are a helpful assistant of the harbour office. " * 40}
HOSTILE = "<img src=x onerror=window.wasHit=1>"
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no chromium: tests/install-system-packages.sh")


async def talk(world: GatewayWorld, session: str, num_turns: int) -> str:
    """A conversation of streamed turns; returns its home."""
    home = ""
    for number in range(num_turns):
        messages = [
            SYSTEM,
            *({"role": "user", "content": f"question {one} " * 30} for one in range(number + 1)),
        ]
        answer = await world.chat(session, messages=messages, stream=True)
        home = answer.headers["x-homing-backend"]
    return home


def caching_world(**config: Any) -> GatewayWorld:
    world = GatewayWorld(num_backends=3, **config)
    for backend in world.backends:
        backend.default = caching_answer()
    return world


# -- files


async def test_every_file_of_the_page_is_served_with_a_strict_policy() -> None:
    """The page, and all it names; nothing inline, nothing from outside, not to be framed."""
    async with GatewayWorld(num_backends=1) as world:
        page = await world.admin.get("/admin/")
        named = re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page.text)
        assert len(named) >= 8
        for path in ("", *named):
            answer = await world.admin.get(f"/admin/{path}")
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            again = await world.admin.get(f"/admin/{path}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await world.admin.get("/admin")).headers["location"] == "/admin/"
        for outside in ("../api.py", "..%2fapi.py", "vendor", "nothing.js", "%2e%2e/settings.py"):
            assert (await world.admin.get(f"/admin/dashboard/{outside}")).status_code == 404


async def test_the_page_opens_without_a_token_and_its_data_does_not() -> None:
    """It holds nothing; what it shows it must ask for."""
    async with GatewayWorld(num_backends=1, environ={"HOMING_ADMIN_TOKEN": "t"}) as world:
        assert (await world.admin.get("/admin/")).status_code == 200
        assert (await world.admin.get("/admin/v1/summary")).status_code == 401


def test_our_scripts_never_make_markup_of_text() -> None:
    """Belt and braces beside trusted types: no door to it is used, and nothing comes from outside."""
    doors = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    )
    for path in DIRECTORY.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not doors.search(text), path
        assert "https://" not in text, path
    html = (DIRECTORY / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\son\w+=|https?://", html)
    assert "Leon Sorokin" in (DIRECTORY / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")


# -- in a browser


async def open_page(world: GatewayWorld, browser: Browser) -> Page:
    page = await browser.open(f"{world.admin.base_url}/admin/")
    await page.until("document.querySelector('#health').className.includes('is-good')")
    return page


@needs_browser
@pytest.mark.timeout(180)
async def test_an_operator_finds_explains_and_drains() -> None:
    """Find a session by its id, read its turns, explain the next one, drain its home after being asked,
    and watch it leave; without an error in the console or a breach of the policy."""
    async with caching_world() as world, Browser() as browser:
        home = await talk(world, "alice", 4)
        page = await open_page(world, browser)
        await page.fill("#session-id", "alice")
        await page.click("#session-search button")
        await page.until("document.querySelectorAll('#session-detail .timeline li').length === 4")
        detail = await page.text("#session-detail")
        assert "cached" in detail
        assert home in detail

        await page.click("#session-detail button[data-focus='explain']")
        assert await page.evaluate("document.querySelector('#explain-session').value") == "alice"
        await page.click("#explain-form button")
        await page.until("document.querySelector('#explain-body table')")
        assert f"would go to {home}: hit" in await page.text("#explain-body")

        await page.click(f"#fleet button[data-focus='drain:{home}']")
        await page.until("document.querySelector('#confirm').open")
        assert "recompute" in await page.text("#confirm")
        await page.click("#confirm button[value='no']")
        assert world.state(int(home[1:])) == "ready"
        await page.click(f"#fleet button[data-focus='drain:{home}']")
        await page.until("document.querySelector('#confirm').open")
        await page.click("#confirm-yes")
        await page.until("document.querySelector('#fleet').innerText.includes('1 session, 0 requests left')")
        assert world.state(int(home[1:])) == "draining"

        assert await talk(world, "alice", 5) != home
        await page.until("document.querySelector('#fleet').innerText.includes('empty')")
        await page.until("document.querySelector('#session-detail .timeline .move')")
        assert "home draining" in await page.text("#moves-body")
        await page.click(f"#fleet button[data-focus='drain:{home}']")
        await world.wait_for(lambda: world.state(int(home[1:])) == "ready")
        assert page.trouble == []


@needs_browser
@pytest.mark.timeout(180)
async def test_names_from_outside_stay_text() -> None:
    """Markup in names of models, labels and sessions is shown as it is written, and does nothing."""
    world = caching_world()
    for backend in world.backends:
        backend.model = HOSTILE
    async with world, Browser() as browser:
        await world.chat(
            f"alice {HOSTILE}", model=HOSTILE, messages=[SYSTEM, {"role": "user", "content": HOSTILE}]
        )
        await world.admin.patch("/admin/v1/backends/b0", json={"labels": {HOSTILE: HOSTILE}})
        page = await open_page(world, browser)
        assert HOSTILE in await page.text("#fleet-body")
        await page.click("#recent-body button")
        await page.until("document.querySelector('#session-detail .facts')")
        assert HOSTILE in await page.text("#session-detail")
        for selector in ("#session-id", "#explain-session", "#explain-message"):
            await page.fill(selector, f"alice {HOSTILE}")
        await page.click("#session-search button")
        await page.click("#explain-form button")
        await page.until("document.querySelector('#explain-body table')")
        assert await page.evaluate("document.querySelectorAll('img').length") == 1  # our own icon
        assert await page.evaluate("window.wasHit") is None
        assert page.trouble == []


@needs_browser
@pytest.mark.timeout(180)
async def test_a_token_is_asked_for_and_kept_for_this_tab_only() -> None:
    """A wrong one is asked for again; a reader may look and is told that it may not change."""
    environ = {"HOMING_ADMIN_TOKEN": "operate-me", "HOMING_ADMIN_READ_TOKEN": "read-me"}
    async with caching_world(environ=environ) as world, Browser() as browser:
        page = await browser.open(f"{world.admin.base_url}/admin/")
        for given, said in (("guess", "needs a token"), ("read-me", "token was refused")):
            await page.until(
                f"document.querySelector('#health').textContent.includes('{said}')"
                " && document.querySelector('#token-dialog').open"
            )
            await page.fill("#token-input", given)
            await page.click("#token-form .primary")
        await page.until("document.querySelector('#health').className.includes('is-good')")
        assert await page.evaluate("localStorage.length") == 0
        assert await page.evaluate("document.cookie") == ""
        await page.click("#fleet button[data-focus='cordon:b0']")
        await page.until("document.querySelector('#confirm').open")
        await page.click("#confirm-yes")
        await page.until("document.querySelector('#toasts').innerText.includes('read-only')")
        assert world.state(0) == "ready"
        refused = [one for one in page.trouble if "401" not in one and "403" not in one]
        assert refused == []  # the browser itself notes refused requests


@needs_browser
@pytest.mark.timeout(180)
async def test_keys_themes_and_a_phone() -> None:
    """Everything by keyboard, both themes, nothing wider than 390 points; a gateway that leaves is told."""
    async with caching_world() as world, Browser() as browser:
        await talk(world, "alice", 3)
        page = await open_page(world, browser)
        await page.press("/")
        assert await page.evaluate("document.activeElement.id") == "session-id"
        await page.ask("Input.insertText", text="alice")
        await page.press("Enter")
        await page.until("document.querySelector('#session-detail .timeline')")
        await page.evaluate("document.activeElement.blur()")
        await page.press("?")
        await page.until("document.querySelector('#help-dialog').open")
        await page.press("Escape")
        await page.until("!document.querySelector('#help-dialog').open")

        background = "getComputedStyle(document.body).backgroundColor"
        await page.prefer("dark")
        dark = await page.evaluate(background)
        await page.prefer("light")
        light = await page.evaluate(background)
        assert dark != light
        for expected in (light, dark):
            await page.press("t")
            assert await page.evaluate(background) == expected

        await page.resize(390, 844, is_phone=True)
        await page.until("document.documentElement.scrollWidth <= 390")
        assert await page.evaluate("getComputedStyle(document.querySelector('td')).display") != "table-cell"

        # a control that has the focus keeps it while the page is drawn anew around it
        await page.evaluate("document.querySelector(\"[data-focus='drain:b1']\").focus()")
        await world.admin.patch("/admin/v1/backends/b0", json={"weight": 7})
        await page.until("document.querySelector('#fleet-body').innerText.includes('7')")
        assert await page.evaluate("document.activeElement.dataset.focus") == "drain:b1"
        assert page.trouble == []

        await world.gateway.stop(drain_timeout_s=0)
        await page.until("document.querySelector('#health').innerText.includes('retrying')")
