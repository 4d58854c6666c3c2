"""The page and its endpoints: our own API as JSON, and what a person sees in a real browser.

The browser is the machine's own Chromium; without one its tests are skipped.
"""

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

from core.errors import InvalidRequestError
from orchestrator.autoscaling import PoolScale
from tests.openai_stack import Edges, edges
from tests.tiny_models import EOS, TinyFactory

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
TOKEN = "s3cret"
NO_NETWORK = ("background-networking", "component-update", "sync", "quic", "gpu")


class Scaler:
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self.scales = {"copy": PoolScale(1, 0, 4)}

    def scale(self, pool: str, replicas: int) -> int:
        """As `orchestrator.autoscaling` does, without drafters."""
        if pool not in self.scales:
            raise InvalidRequestError("pool", f"there is no pool {pool!r}")
        previous, self.scales[pool].wanted = self.scales[pool].wanted, replicas
        return previous


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tiny: TinyFactory, tmp_path_factory: Any) -> AsyncIterator[Edges]:
    """A whole system with the page on, that asks for a token."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    target = tiny("llama", eos_token_id=EOS, max_position_embeddings=2048)
    async with edges(target, Scaler(), token, {"max_length": 2048}, page=True) as running:
        running.http.headers["Authorization"] = f"Bearer {TOKEN}"
        yield running


# ---------------------------------------------------------------- endpoints


async def test_files(served: Edges):
    """Everything the page needs comes from here, and nothing else may be loaded or frame it."""
    for path, kind in {"/": "html", "/page.js": "javascript", "/page.css": "css"}.items():
        got = await served.http.get(path, headers={"Authorization": ""})
        assert got.status_code == 200 and kind in got.headers["content-type"]
        assert "default-src 'self'" in got.headers["content-security-policy"]
        assert "http://" not in got.text.replace("http://www.w3.org/", "")
        assert "https://" not in got.text


async def test_status(served: Edges):
    """The page would draw nothing, or a pool without its limits."""
    status = (await served.http.get("/forerun/status")).json()
    assert [replica["health"] for replica in status["verifiers"]] == ["REPLICA_HEALTH_READY"]
    copy, twin = status["drafter_pools"]
    assert (copy["pool"], copy["kind"], len(copy["replicas"])) == ("copy", "draft_model", 1)
    limits = {"wanted_replicas": 1, "min_replicas": 0, "max_replicas": 4, "is_autoscaled": False}
    assert copy["scale"] == limits and "scale" not in twin
    assert status["num_waiting"] == 0


async def test_generate(served: Edges):
    """Tokens without a text, an origin or their drafter's name have no colour."""
    body = {
        "prompt": "hello",
        "sampling": {"temperature": 0},
        "stopping": {"max_new_tokens": 24},
        "speculation": {"drafter": "copy"},
        "output": {"return_token_ids": True},
    }
    text, drafters = "", set()
    async with served.http.stream("POST", "/forerun/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                message = json.loads(line.removeprefix("data: "))
                assert len(message["token_texts"]) == len(message["origins"])
                text += message.get("text", "")
                if "TOKEN_ORIGIN_ACCEPTED_DRAFT" in message["origins"]:
                    drafters.add(message["drafter"])
    assert drafters == {"copy"} and message["finished"]["usage"]["completion_tokens"] == 24
    got = await served.complete(temperature=0)
    assert got.choices[0].text == text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/forerun/generate", {"prompt": ""}, 400, "prompt"),
        ("/forerun/generate", {"promt": "x"}, 400, "body"),
        ("/forerun/scale", {"pool": "other", "replicas": 1}, 400, "pool"),
    ],
)
async def test_refusals(served: Edges, path: str, body: Any, status: int, param: str):
    """The page shows what is wrong."""
    got = await served.http.post(path, json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (status, param)


async def test_token_is_needed(served: Edges):
    """The page's own endpoints must not be a way around the token."""
    headers = {"Authorization": "Bearer wrong"}
    scale = {"pool": "copy", "replicas": 0}
    for got in (
        await served.http.get("/forerun/status", headers=headers),
        await served.http.post("/forerun/generate", json={"prompt": "x"}, headers=headers),
        await served.http.post("/forerun/scale", json=scale, headers=headers),
    ):
        assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"


# ---------------------------------------------------------------- in a browser


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page(served: Edges) -> AsyncIterator[Page]:
    """The page in headless Chromium, after the token was given. Its console stays empty."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", *(f"--disable-{name}" for name in NO_NETWORK)]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = await browser.new_page(viewport={"width": 1100, "height": 900})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text))
        await page.goto(str(served.http.base_url))
        await page.fill("#token", TOKEN)
        await page.click("#login button")
        yield page
        await browser.close()
        # Chromium itself notes the answers of 401 and 400 that are part of this.
        assert [problem for problem in problems if "status of 40" not in problem] == []


async def ask(page: Page, prompt: str, drafter: str) -> None:
    """Type a prompt, choose a drafter, send, and wait for the end."""
    await page.select_option("#form", "prompt")
    await page.select_option("#drafter", drafter)
    await page.fill("#tokens", "48")
    await page.fill("#prompt", prompt)
    await page.click("#send")
    await expect(page.locator("#summary")).to_contain_text("48 tokens")


async def test_a_prompt_gives_coloured_tokens(served: Edges, page: Page):
    """The answer is the API's own, and accepted draft tokens have their drafter's colour."""
    colours = {}
    expected = (await served.complete("hello", temperature=0, max_tokens=48)).choices[0].text
    for drafter in ("copy", "twin"):
        await ask(page, "hello", drafter)
        drafted = page.locator("#answer .draft")
        assert {await d.get_attribute("data-drafter") for d in await drafted.all()} == {drafter}
        colours[drafter] = await drafted.first.evaluate("e => getComputedStyle(e).color")
        shown = await page.locator("#answer").evaluate("e => e.textContent")
        assert expected.startswith(shown.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert len(shown) > 10
    plain = page.locator("#answer span:not(.draft)").first
    colours["target"] = await plain.evaluate("e => getComputedStyle(e).color")
    assert len(set(colours.values())) == 3


async def test_charts_follow(page: Page):
    """A chart that stands still though tokens are drafted."""
    await ask(page, "hello", "copy")
    await expect(page.locator("#acceptance polyline").first).to_be_attached()
    await expect(page.locator("#acceptance-key")).to_contain_text("copy 100 %")
    await expect(page.locator("#hits rect").first).to_be_attached()
    await expect(page.locator("#hits-key")).to_contain_text("copy")


async def test_cluster_and_scale(served: Edges, page: Page):
    """The cluster as it is, and a control that reaches the scaler."""
    rows = page.locator("#replicas tr")
    await expect(rows).to_have_count(6)
    await expect(rows.nth(1)).to_contain_text("verifier")
    await expect(rows.nth(1).locator(".READY")).to_have_text("ready")
    await page.fill("#replicas form[data-pool=copy] input", "3")
    await page.click("#replicas form[data-pool=copy] button")
    await expect(page.locator("#pool-copy .title")).to_have_text("copy (draft_model) · 3 wanted")
    assert await page.locator("#pool-twin form").count() == 0


async def test_an_error_is_shown(page: Page):
    """A refused request leaves an empty answer and no reason."""
    await page.fill("#prompt", "hello")
    await page.fill("#tokens", "9999")
    await page.click("#send")
    await expect(page.locator("#problem")).to_contain_text("max_new_tokens")
    await expect(page.locator("#send")).to_be_visible()


async def test_stop_ends_the_generation(served: Edges, page: Page):
    """A stream that goes on unseen holds its slot."""
    await page.fill("#tokens", "2000")
    before = served.stack.engine.status().num_completion_tokens
    await page.click("#send")
    await page.click("#stop")
    await expect(page.locator("#send")).to_be_visible()
    await expect(page.locator("#totals")).to_contain_text("0 running")
    assert served.stack.engine.status().num_completion_tokens - before < 2000
