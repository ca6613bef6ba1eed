"""The text of a policy file: what it may say, and a sentence with the line for each mistake."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.policy import IdleRule, Limits, Policy, Webhook
from gpu_worker_pool.errors import PolicyError
from gpu_worker_pool.ledger.policy_text import MOST_WEBHOOKS, parse_policy

HOOK = "https://chat.example.org/hook"
WHOLE = """
# The policy of the lab.
["*"]
most_gpus = 4
most_waiting = 20
highest_priority = 0
longest_time = "1d"
idle_may_be_asked = true

[account.physics]          # a user or a named key
most_gpus = 8
highest_priority = 10

[group.students]
most_gpus = 1
longest_time = "8h"

[group.robots]
keys = ["ci", "nightly"]
most_waiting = 500
idle_may_be_asked = false

[idle]
after = "45m"
grace = "10m"

[[webhook]]
url = "https://chat.example.org/hook?room=gpu"
events = ["granted", "idle"]
template = '{"text": "${account}: ${event}"}'
secret_file = "/etc/gpu-pool/webhook.secret"

[[webhook]]
url = "http://127.0.0.1:9000"

[metrics]
account_names = true
"""


def accounts(name: str) -> tuple[str, ...]:
    return (f"key:{name}",)


def test_all_that_it_may_say() -> None:
    policy = parse_policy(WHOLE).policy(accounts)
    students, robots = Limits(most_gpus=1, longest_seconds=28_800), Limits(most_waiting=500, idle_may_be_asked=False)
    assert policy == Policy(
        Limits(4, 20, 0, 86_400, True),
        {"key:physics": Limits(most_gpus=8, highest_priority=10)},
        {"students": students, "robots": robots},
        {"key:ci": ("robots",), "key:nightly": ("robots",)},
        IdleRule(2700, 600),
        (
            Webhook(
                "https://chat.example.org/hook?room=gpu",
                ("granted", "idle"),
                '{"text": "${account}: ${event}"}',
                "/etc/gpu-pool/webhook.secret",
            ),
            Webhook("http://127.0.0.1:9000", ("granted", "ended", "lost", "idle")),
        ),
        names_in_metrics=True,
    )


def test_an_empty_file_limits_nobody() -> None:
    policy = parse_policy("# nothing yet\n").policy(accounts)
    assert policy == Policy()
    assert not policy.has_limits


def test_the_first_that_says_something_counts() -> None:
    policy = parse_policy(WHOLE).policy(accounts)
    assert policy.limits_of("user:7") == Limits(4, 20, 0, 86_400, True)
    assert policy.limits_of("user:7", ("students",)) == Limits(1, 20, 0, 28_800, True)
    # Of several groups the most generous, and its own entry before them.
    assert policy.limits_of("user:7", ("students", "robots")).most_waiting == 500
    assert policy.limits_of("key:physics", ("students",)) == Limits(8, 20, 10, 28_800, True)
    assert policy.limits_of("key:ci") == Limits(4, 500, 0, 86_400, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('["*"]\nmost_gpu = 4\n', "p.toml, line 2: 'most_gpu' is not a limit; did you mean most_gpus?"),
        ("\n\n[acount.alice]\n", "p.toml, line 3: 'acount' is not a table of a policy; did you mean account?"),
        ('["*"]\n\nmost_gpus = "4"\n', "p.toml, line 3: most_gpus must be a whole number of at least 0, not '4'"),
        ('["*"]\nmost_gpus = true\n', "p.toml, line 2: most_gpus must be a whole number of at least 0, not true"),
        ('["*"]\nmost_gpus = 1.5\n', "p.toml, line 2: most_gpus must be a whole number of at least 0, not 1.5"),
        ("[account.a]\nmost_waiting = -1", "p.toml, line 2: most_waiting must be a whole number of at least 1, not -1"),
        ("account.a.most_gpus = -2", "p.toml, line 1: most_gpus must be a whole number of at least 0, not -2"),
        ('"*" = 4', "p.toml, line 1: * must be a table, not 4"),
        ("[group]\nx = 3", "p.toml, line 2: group.x must be a table, not 3"),
        ('["*"]\nidle_may_be_asked = "yes"', "p.toml, line 2: idle_may_be_asked must be true or false, not 'yes'"),
        (
            '["*"]\nlongest_time = "-8h"',
            'p.toml, line 2: longest_time must be a time such as "90s", "30m", "8h" or "2d", not \'-8h\'',
        ),
        (
            '["*"]\nlongest_time = 8',
            'p.toml, line 2: longest_time must be a time such as "90s", "30m", "8h" or "2d", not 8',
        ),
        ('[idle]\nafter = "0s"', 'p.toml, line 2: after must be a time such as "90s", "30m", "8h" or "2d", not \'0s\''),
        (
            '[group.g]\nmost_gpus = 1\nkeys = [\n  "a",\n  3,\n]\n',
            'p.toml, line 3: keys must be a list of texts such as ["a", "b"], not [\'a\', 3]',
        ),
        (
            '[group.g]\nkeys = [\n  "a",\n  "b",\n]\nhighest_priority = "x"',
            "p.toml, line 6: highest_priority must be a whole number, not 'x'",
        ),
        (
            '[[webhook]]\nurl = "http://a"\n[[webhook]]\n# later\nevents = ["lost"]\n',
            'p.toml, line 3: this webhook has no url: write url = "https://…"',
        ),
        (
            '[[webhook]]\nurl = "http://a"\n[[webhook]]\nurl = "ftp://b"\n',
            "p.toml, line 4: url must be an address such as https://chat.example.org/hook, not 'ftp://b'",
        ),
        (
            '[[webhook]]\nurl = "http://a"\nevents = ["lost", "found"]',
            "p.toml, line 3: 'found' is not an event; there are granted, ended, lost, idle",
        ),
        *(
            (f'[[webhook]]\nurl = "{url}"', f"p.toml, line 2: url must be an address such as {HOOK}, not {url!r}")
            for url in ("http://a:99999/", "http://a:0", "http://a:port/", "http://[::1/", "http://[a]/", "http://:80/")
        ),
        (
            '[[webhook]]\nurl = "http://a"\nsecret_file = "/a\\u0000b"',
            "p.toml, line 3: secret_file must be an absolute path, not '/a\\x00b'",
        ),
        ('[webhook]\nurl = "http://a"', "p.toml, line 1: write [[webhook]] with two brackets: there may be several"),
        (
            '[[webhook]]\nurl = "http://a"\nsecret_file = "s"',
            "p.toml, line 3: secret_file must be an absolute path, not 's'",
        ),
        ("[[webhook]]\nurl = 'http://a'\n" * (MOST_WEBHOOKS + 1), "p.toml, line 1: more than 8 webhooks"),
        ('["*"]\nmost_gpus = \n', "p.toml, line 2: this is not TOML: Invalid value"),
        ('["*"]\n\nmost_gpus = 4\nmost_gpus = 5\n', "p.toml, line 4: this is not TOML: Cannot overwrite a value"),
        ('["*"]\ntext = """never closed\n', "p.toml, line 2: this is not TOML: "),
        ("[" * 5000, "p.toml, line 1: "),
        (f'["*"]\n\nmost_gpus = {"9" * 5000}\n', "p.toml, line 3: this is not TOML: Exceeds the limit (4300 digits)"),
    ],
)
def test_each_mistake_gets_a_sentence_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy(text, "p.toml")
    assert str(raised.value).startswith(sentence)
    assert f"line {raised.value.line}:" in sentence


def test_a_huge_value_is_refused_quickly() -> None:
    text = "[group.g]\nkeys = [\n" + "1,\n" * 60_000 + "]\n"
    with pytest.raises(PolicyError, match="line 1: keys must be a list of texts"):
        parse_policy(text, "p.toml")
