"""An OpenAI-compatible endpoint, spoken to over real HTTP: retries, rate limits, partial failure, and the key."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest
from chat_server import ChatServer, Reply, completion, serving

from reasonlab.errors import UserError
from reasonlab.rollout.endpoint import Completion, Endpoint, Job
from reasonlab.rollout.types import Sampling

SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=77)


@pytest.fixture(autouse=True)
def _straight_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server: ChatServer, *prompts: str, **settings: Any) -> dict[str, Completion]:
    endpoint = Endpoint(server.url, "served", **{"first_wait": 0.01, "timeout": 5.0, "attempts": 3, **settings})
    jobs = [Job(prompt, number) for number, prompt in enumerate(prompts)]
    return {prompts[number]: completion for number, completion in endpoint.complete_all(jobs, SAMPLING)}


def test_a_request_carries_the_protocol_and_the_reply_is_read() -> None:
    with serving(ChatServer(lambda prompt, *_: completion(f"<{prompt}>", 12, "length"))) as server:
        found = ask(server, "one", "two")
    assert found == {p: Completion(f"<{p}>", 12, "length") for p in ("one", "two")}
    body = next(body for body in server.bodies if body["messages"][0]["content"] == "two")
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("served", 0.5, 0.9, 77)
    assert body["seed"] == 1
    assert "Authorization" not in server.headers[0]


def test_what_can_be_mended_is_asked_again() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        if attempt == 1:
            return {
                "broken": (500, {}, "oops"),
                "nonsense": b"{not json",
                "empty": {"choices": []},
                "silent": 1.5,
                "busy": (503, {"Retry-After": formatdate(time.time() - 5)}, ""),
            }[prompt]
        return completion("well")

    with serving(ChatServer(rule)) as server:
        found = ask(server, "broken", "nonsense", "empty", "silent", "busy", timeout=0.4)
    assert {completion.text for completion in found.values()} == {"well"}
    assert set(server.attempts.values()) == {2}


def test_retry_after_holds_every_worker_back() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        if prompt == "first" and attempt == 1:
            return 429, {"Retry-After": "0.6"}, "slow down"
        time.sleep(0.15)
        return completion("ok")

    with serving(ChatServer(rule)) as server:
        found = ask(server, "first", "second", "third", "fourth", concurrency=2)
    assert all(completion.text == "ok" for completion in found.values())
    gaps = sorted(server.times)
    assert gaps[2] - gaps[0] >= 0.55, "after the limit was met, nobody may ask before its end"


def test_failures_stay_their_own_and_say_why() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        if prompt == "refused":
            return 400, {}, '{"error": {"message": "the prompt\\nis too long"}}'
        return (500, {}, "") if prompt == "doomed" else completion("fine")

    with serving(ChatServer(rule)) as server:
        found = ask(server, "refused", "doomed", "good")
    assert found["refused"].failure == "HTTP 400: the prompt is too long"
    assert found["doomed"].failure == "HTTP 500 (3 attempts)"
    assert found["good"] == Completion("fine", 5, "stop")
    assert server.attempts == {"refused": 1, "doomed": 3, "good": 1}


def test_concurrency_is_limited() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.02)
        return completion("ok")

    with serving(ChatServer(rule)) as server:
        assert len(ask(server, *map(str, range(20)), concurrency=3)) == 20
    assert 1 < server.most_under_way <= 3


def test_a_server_that_died_ends_the_evaluation_instead_of_failing_every_answer() -> None:
    with serving(ChatServer(lambda *_: (500, {}, "down"))) as server, pytest.raises(UserError, match="in a row"):
        ask(server, *map(str, range(200)), attempts=1, concurrency=4)
    assert len(server.bodies) < 60


def test_thinking_that_the_server_takes_apart_is_put_together() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        if prompt == "done":
            return completion("\\boxed{4}", 9, reasoning_content="2+2")
        return completion(None, None, "length", reasoning="maybe \\boxed{5}")

    with serving(ChatServer(rule)) as server:
        found = ask(server, "done", "cut")
    assert found["done"].text == "<think>2+2</think>\\boxed{4}"
    assert found["cut"] == Completion("<think>maybe \\boxed{5}", None, "length")


def test_newer_models_want_another_name_for_the_budget() -> None:
    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        if "max_tokens" in body:
            return 400, {}, '{"error": {"message": "Unsupported: use max_completion_tokens instead"}}'
        return completion("ok", body["max_completion_tokens"])

    with serving(ChatServer(rule)) as server:
        assert ask(server, "x")["x"] == Completion("ok", 77, "stop")


def test_the_key_is_sent_and_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    with serving(ChatServer(lambda *_: completion("ok"))) as server:
        ask(server, "x", key_variable="MY_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    with (
        serving(ChatServer(lambda *_: (401, {}, "no such key: sk-very-secret"))) as server,
        pytest.raises(UserError, match="MY_KEY") as refused,
    ):
        ask(server, "x", key_variable="MY_KEY")
    assert "sk-very-secret" not in str(refused.value)
    with pytest.raises(UserError, match="carries a secret"):
        Endpoint("http://me:sk-very-secret@host/v1")


def test_the_key_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with serving(ChatServer(lambda *_: completion("stolen"))) as other:
        target = other.url + "/chat/completions"
        for status in (302, 307):
            with serving(ChatServer(lambda *_, s=status: (s, {"Location": target}, ""))) as server:
                assert f"HTTP {status}" in ask(server, "x")["x"].failure
        assert not other.headers


def test_connect_finds_the_model_or_says_what_is_missing() -> None:
    with serving(ChatServer(lambda *_: completion(""))) as server:
        endpoint = Endpoint(server.url + "/")
        endpoint.connect()
        assert endpoint.model == "served"
    with pytest.raises(UserError, match="does not answer"):
        Endpoint(server.url).connect()
    with (
        serving(ChatServer(lambda *_: completion(""), ("a", "b"))) as server,
        pytest.raises(UserError, match=r"serves a, b\. Name the model"),
    ):
        Endpoint(server.url).connect()
