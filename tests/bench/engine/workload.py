"""What every engine has to do: the same token ids for all of them, new ones in each repetition.

Prefill and decode prompts are random ids (dense arithmetic does not care). The chat is text: a system prompt,
then turns of about 35 new tokens. Its answers are given, not generated, so that all engines see one history;
an engine that reuses gets history and answer once as a prompt of its own, unmeasured, which leaves the same
KV as having generated that answer. Pure: knows no engine and no clock.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

SYSTEM = """Ticket {ticket}. You are the support assistant of a company that makes routers for small offices.
Answer in two or three short sentences. Ask for the model name and for the colour of the power light before
you suggest a repair. Never invent part numbers, prices or dates of delivery; if you do not know one, say that
a colleague will write by e-mail. """
POLICIES = (
    "Returns are free within thirty days if the box is complete.",
    "The warranty covers the power supply for two years and the antennas for one.",
    "Firmware may be changed only over a cable, never over the radio.",
    "A reset to factory settings deletes the customer's passwords; warn before you recommend it.",
    "Do not ask for passwords, and remove them from the ticket if a customer sends one.",
    "A router that smells or is hot to the touch must be unplugged first and discussed afterwards.",
    "Customers with a service contract may have a replacement sent before they return the old device.",
    "If the line itself is down, say so and name the status page instead of changing settings.",
    "Speak plainly, without abbreviations that are not printed on the device.",
    "Offer a summary of the steps at the end of the conversation.",
    "Complaints about the network of a neighbour are not ours to solve; be kind about it.",
    "Mesh extenders of other makers may work, but we neither test nor support them.",
    "Slow radio is most often a matter of the channel: ask how many neighbours are in sight first.",
    "A cable longer than a hundred metres needs a switch between its ends.",
    "Telephones on the same line need a filter, or calls will cut the connection.",
    "If the customer is angry, apologise once, then help; do not apologise in every message.",
    "Orders, invoices and changes of address belong to another team; pass the ticket on.",
    "Close the ticket only after the customer has confirmed that the problem is gone.",
)
TURNS = (
    ("My router restarts by itself every few hours since Monday. What should I check first?",
     "I am sorry about that. Which model is it, and which colour does the power light have just before it "
     "restarts? Please also feel whether the case is warm."),
    ("It is the model with four antennas, and the power light blinks orange before it goes off.",
     "Blinking orange means that the supply voltage drops. Please plug the power supply straight into the "
     "wall, without a strip, and tell me whether it still restarts."),
    ("I plugged it into the wall as you said, but it went off again after about two hours.",
     "Thank you for trying. Then the power supply itself is the likely cause, and it is under warranty. "
     "Was the device in a closed cupboard or near a heater?"),
    ("It stands in a small cupboard with the printer, so the air in there is rather warm.",
     "Heat makes the voltage drop sooner. Please place it in the open for one day. If it still restarts, we "
     "send a new power supply at no cost."),
    ("It has been in the open since yesterday and has not restarted once. Can I update it now?",
     "Good news. Yes, but only over a cable: connect a computer to the first port, open the address printed "
     "on the label, and choose the file that you downloaded."),
    ("The update went well, thank you. Please list for me what we did, in a few short steps.",
     ""),
)  # fmt: skip


class Kind(enum.Enum):
    PREFILL = "prefill"  # measured to the first token, in tokens/s
    DECODE = "decode"  # measured from the first token on, in tokens/s
    TTFT = "ttft"  # measured to the first token, in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measurement of one engine."""

    name: str
    kind: Kind
    prompts: list[list[int]]
    num_tokens: int = 1
    history: list[int] | None = None  # what a reusing engine has computed before, unmeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work; `QUICK` is for trying the benchmark itself."""

    prefills: tuple[int, ...] = (256, 1024)
    decodes: tuple[tuple[int, int], ...] = ((1, 256), (8, 128))  # sequences, tokens of context of each
    num_decode_tokens: int = 33
    num_turns: int = 6
    long_history: int = 4096


QUICK = Sizes(prefills=(32,), decodes=((1, 32), (2, 32)), num_decode_tokens=5, num_turns=2, long_history=64)


def make_steps(sizes: Sizes, encode: Encode, repetition: int) -> list[Step]:
    """Return what is measured in one repetition; no prompt shares a block with another repetition's."""
    rng = random.Random(repetition)
    steps = [
        Step(name=f"prefill {count}", kind=Kind.PREFILL, prompts=[_random_ids(rng, count)])
        for count in sizes.prefills
    ]
    steps += [
        Step(
            name=f"decode ×{num_sequences}",
            kind=Kind.DECODE,
            prompts=[_random_ids(rng, context) for _ in range(num_sequences)],
            num_tokens=sizes.num_decode_tokens,
        )
        for num_sequences, context in sizes.decodes
    ]
    steps += chat_steps(sizes.num_turns, encode, ticket=10_000 + rng.randrange(90_000))
    # Its history stays the same, so that an engine which keeps it computes it once.
    history = _random_ids(random.Random(-1), sizes.long_history)
    question = encode(_user_text(f"Ticket {repetition}: {TURNS[0][0]}"))
    name = f"history {sizes.long_history}"
    return [*steps, Step(name=name, kind=Kind.TTFT, prompts=[history + question], history=history)]


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1_000, 49_000) for _ in range(count)]


def chat_steps(num_turns: int, encode: Encode, *, ticket: int) -> list[Step]:
    """Return the turns of one conversation; each prompt begins with the whole history before it."""
    system = SYSTEM.format(ticket=ticket) + " ".join(POLICIES)
    history: list[int] = []
    text = f"<|im_start|>system\n{system}"
    steps = []
    for number, (question, answer) in enumerate(TURNS[:num_turns], start=1):
        prompt = history + encode(text) + encode(_user_text(question))
        steps.append(Step(name=f"turn {number}", kind=Kind.TTFT, prompts=[prompt], history=history or None))
        history, text = prompt + encode(answer), ""
    return steps


def _user_text(question: str) -> str:
    """What a turn adds: the end of the message before it, the question, and the start of the answer."""
    return f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
