"""An agent with two sub-agents: three conversations in one session, each with its own home.

Start a fleet with `make run`, then run `.venv/bin/python examples/agent.py`. All three share the session id.
A second header, here Claude Code's, distinguishes them (`keys.header_qualifiers`). So the sub-agents can run
on two backends at once, and each finds its own history in every turn.
"""

from __future__ import annotations

import argparse
import uuid
from concurrent.futures import ThreadPoolExecutor

import openai

TOOLS_PROMPT = "You are a coding agent. You may read files, search and run tests. " * 8
TASKS = {
    "main": "Plan the change of the parser.",
    "search": "Find every caller of the parser.",
    "tests": "Find the tests of the parser.",
}
NUM_TURNS = 3


def work(client: openai.OpenAI, model: str, session_id: str, agent: str) -> list[str]:
    """Run one agent's turns and return a line for each."""
    headers = {"x-session-id": session_id}
    if agent != "main":
        headers["x-claude-code-agent-id"] = agent
    messages = [{"role": "system", "content": TOOLS_PROMPT}, {"role": "user", "content": TASKS[agent]}]
    lines = []
    for number in range(1, NUM_TURNS + 1):
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts are what the API takes
            max_tokens=12,
            extra_headers=headers,
        )
        answer = raw.parse()
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        lines.append(
            f"{agent:<7} turn {number}  {raw.headers['x-homing-backend']:<10} "
            f"{raw.headers['x-homing-affinity']:<6} {cached:>4} of {answer.usage.prompt_tokens} tokens cached"
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        messages.append({"role": "user", "content": f"Step {number} is done. Continue."})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent with sub-agents.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    client = openai.OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    session_id = f"agent-{uuid.uuid4()}"
    with ThreadPoolExecutor(len(TASKS)) as pool:
        for lines in pool.map(lambda agent: work(client, model, session_id, agent), TASKS):
            print("\n".join(lines))


if __name__ == "__main__":
    main()
