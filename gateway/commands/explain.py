"""`homing explain ID`: where a session lives, what it has cost, why it moved and where it would go now."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from gateway.commands.admin_client import AdminClient, add_admin_arguments, print_json
from gateway.commands.exits import CommandError, CommandFailed
from gateway.commands.terminal import add_row, ago, console, count, plain, seconds, share, table

IGNORED = {
    "shared": "Many conversations came under this id. It names the longest of them; {} requests of others "
    "were bound by how their conversation began.",
    "never_repeats": "Ids in this header or field hardly ever repeat, so they name no sessions; {} requests "
    "were bound by how their conversation began.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_admin_arguments(parser)
    parser.add_argument("id", metavar="ID", help="the client's session id, or a session key or its beginning")
    parser.add_argument("--model", help="model that the session uses (default: try all)")
    parser.add_argument("--tenant", default="default", help="tenant of the session")


def run(options: argparse.Namespace) -> int:
    client = AdminClient(options.admin_url)
    found, is_raw_id = _find(client, options)
    key = str(found["sessions"][0]["key"])
    session = client.get(f"/sessions/{key}")
    now = _decide_now(client, options, session) if is_raw_id else None
    if options.json:
        print_json({"session": session, "next_turn": now, "ignored_ids": found["ignored_ids"]})
        return 0
    _show(session, now)
    for ignored in found["ignored_ids"]:
        _show_ignored(ignored)
    return 0


def _find(client: AdminClient, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the sessions found, at least one, and whether by the client's id. Raises CommandFailed."""
    found = client.get("/sessions", session_id=options.id, model=options.model, tenant=options.tenant)
    if found["sessions"]:
        return found, True
    text = options.id.lower()
    if 4 <= len(text) <= 32 and not text.strip("0123456789abcdef"):
        found = client.get("/sessions", key=text)
        if found["sessions"]:
            return found, False
    raise CommandFailed(
        f"no session {options.id!r} is bound. It may have expired. --model and --tenant must match its "
        "requests; only the replica that served a session can find it by the beginning of its key."
    )


def _decide_now(client: AdminClient, options: argparse.Namespace, session: dict[str, Any]) -> Any:
    """Return a dry run of the session's next turn, or None if the gateway cannot decide it."""
    story = session["story"] or {}
    model = options.model or story.get("model")
    body = {"model": model or "", "messages": [{"role": "user", "content": "?"}]}
    question = {"headers": {"x-session-id": options.id}, "body": body, "tenant": options.tenant}
    try:
        return client.post("/route", question)
    except CommandError:  # no backend now, or an unknown model: show the session without it
        return None


def _show(session: dict[str, Any], now: dict[str, Any] | None) -> None:
    out, story = console(), session["story"]
    facts = table("session", session["key"])
    add_row(facts, ["home", f"{session['backend']} (epoch {session['epoch']}, binding {session['version']})"])
    add_row(facts, ["turns", session["turns"]])
    add_row(facts, ["context", f"{count(session['context_tokens'])} tokens"])
    if story is not None:
        add_row(facts, ["key from", story["key_source"]])
        add_row(facts, ["model", story["model"]])
        add_row(facts, ["hit rate", f"{share(story['hit_rate'])} of {count(story['prompt_tokens'])} tokens"])
        add_row(facts, ["last seen", ago(story["last_seen_wall_s"])])
    if now is not None:
        add_row(facts, ["next turn", f"{now['backend']}: {now['affinity']} ({now['reason']})"])
    out.print(facts)
    if story is None:
        out.print(plain("\nThis replica has not served the session recently: no moves or turns to show."))
        return
    if story["moves"]:
        out.print("", _moves(story["moves"]))
    out.print("", _turns(story["last_turns"]))


def _show_ignored(ignored: dict[str, Any]) -> None:
    """Say what became of requests whose id was ignored, and why."""
    for reason, num_requests in ignored["requests"].items():
        why = IGNORED[reason].format(num_requests)
        console().print(plain(f"\n{why} {count(len(ignored['sessions']))} of them are known here:"))
    for key in ignored["sessions"]:
        console().print(plain(f"  homing explain {key}"))


def _moves(moves: list[dict[str, Any]]) -> Table:
    found = table("when", "from", "to", "why", title="moves")
    for move in moves:
        add_row(found, [ago(move["at_wall_s"]), move["before"], move["after"], move["reason"]])
    return found


def _turns(turns: list[dict[str, Any]]) -> Table:
    found = table(
        "when",
        "backend",
        "affinity",
        "why",
        ">prompt",
        ">cached",
        ">first token",
        ">status",
        "outcome",
        title="last turns",
    )
    for turn in turns:
        add_row(
            found,
            [
                ago(turn["at_wall_s"]),
                turn["backend"],
                turn["affinity"],
                turn["reason"],
                count(turn["prompt_tokens"]),
                count(turn["cached_tokens"]),
                seconds(turn["ttft_s"]),
                turn["status"],
                turn["outcome"],
            ],
        )
    return found
