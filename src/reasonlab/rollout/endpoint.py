"""An OpenAI-compatible endpoint: chat completions over HTTP, many at a time, patient with what can be mended.

Requests that meet a rate limit, a server error, a broken connection, a time-out or nonsense are sent again, later and
later, with a jitter that depends on the sample's key; `Retry-After` is honoured by every worker. Requests that are
refused for good become failures of their own answer, not of the evaluation. The API key comes from the environment, is
sent in one header to this one host (redirects are not followed), and appears in no message and no file.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.rollout.types import Sampling

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_AGAIN = {408, 409, 425, 429}  # with these, and all from 500 on, the same request may succeed later
_HOPELESS = {401, 403, 404}  # with these, no other request will fare better
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 600.0
_FAILURES_IN_A_ROW = 24  # answers given up one after the other, none arriving between them: nobody is there any more
_LARGEST_REPLY = 64 << 20
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is wanted: the user's turn, and the key that names the sample."""

    prompt: str
    key: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, or the reason why there is none. `tokens` is None where the server does not say."""

    text: str = ""
    tokens: int | None = 0
    finish: str = "stop"
    failure: str = ""


class _RefusedError(Exception):
    """The server will never answer this request."""


class _LaterError(Exception):
    """Worth another attempt, after so many seconds where the server says how many."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None  # the key is for this host alone


@dataclass
class Endpoint:
    """`url` is the base, as in http://localhost:8000/v1; an empty `model` is asked of the server."""

    url: str
    model: str = ""
    key_variable: str = DEFAULT_KEY_VARIABLE
    concurrency: int = 16
    attempts: int = 6
    timeout: float = 600.0
    first_wait: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the request's body

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/chat/completions")
        parts = urlsplit(self.url)
        if parts.username or parts.password or parts.query:
            raise UserError(
                "the endpoint's URL carries a secret or a query", f"Put the key into the variable {self.key_variable}"
            )
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._limit_name = "max_tokens"
        self._gate = threading.Lock()
        self._not_before = 0.0
        self._stopped = threading.Event()

    # --- before the first request ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find out that somebody is there, and, where no model was named, which one is served."""
        try:
            listing = self._exchange("/models", None, min(self.timeout, 30.0))
        except UserError:
            if not self.model:
                raise
            return  # not every server has a list
        except _LaterError as error:
            raise UserError(f"{self.url} does not answer ({error})", "Check the URL and that the server runs") from None
        except _RefusedError:
            listing = {}
        rows = listing.get("data")
        served = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row] if rows else []
        if self.model:
            return
        if len(served) != 1:
            said = f"serves {', '.join(served[:8])}" if served else "does not list its models"
            raise UserError(f"{self.url} {said}", "Name the model with --endpoint-model NAME")
        self.model = served[0]

    # --- requests ----------------------------------------------------------------------------------------------

    def complete_all(self, jobs: Sequence[Job], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Answers with their numbers, in the order in which they arrive; at most `concurrency` are under way."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        arrived: queue.SimpleQueue[tuple[int, Completion | UserError]] = queue.SimpleQueue()
        for number in range(len(jobs)):
            waiting.put(number)
        self._stopped = stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    arrived.put((number, self.complete(jobs[number], sampling)))
                except UserError as error:
                    arrived.put((number, error))
                except Exception as error:  # a thread that dies in silence would be waited for without end
                    arrived.put((number, Completion(failure=f"{type(error).__name__}: {error}"[:_SHOWN])))

        # Daemons: ctrl-c must not wait for answers that are still under way.
        for _ in range(min(self.concurrency, len(jobs))):
            threading.Thread(target=work, daemon=True).start()
        failures = 0
        try:
            for _ in jobs:
                number, outcome = arrived.get()
                if isinstance(outcome, UserError):
                    raise outcome
                failures = failures + 1 if outcome.failure else 0
                yield number, outcome
                if failures >= max(_FAILURES_IN_A_ROW, 2 * self.concurrency):
                    raise UserError(
                        f"{self.url} failed {failures} times in a row (last: {outcome.failure})",
                        "What has arrived is kept with --out DIR: run the same command again when the server is well",
                    )
        finally:
            stopped.set()

    def complete(self, job: Job, sampling: Sampling) -> Completion:
        """One answer, with as many attempts as are allowed; what cannot be had is a `Completion` with a failure."""
        reason = ""
        for attempt in range(self.attempts):
            if attempt and self._wait(job, attempt):
                break
            self._pass_gate()
            try:
                body = self._body(job, sampling)
                return _completion(self._exchange("/chat/completions", body, self.timeout))
            except _RefusedError as error:
                return Completion(failure=str(error))
            except _LaterError as error:
                reason = str(error)
                if error.after is not None:
                    self._close_gate(error.after)
        return Completion(failure=f"{reason} ({self.attempts} attempts)")

    def _body(self, job: Job, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": job.prompt}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._limit_name: sampling.max_tokens,
            "seed": job.key % 2**31,
            **self.extra,
        }

    def _exchange(self, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "reasonlab"}
        if secret := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {secret}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=timeout) as reply:
                return _parsed(_read(reply, time.monotonic() + timeout))
        except urllib.error.HTTPError as error:
            with error:
                self._judge(error.code, error.headers.get("Retry-After"), _said(error))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            timed_out = isinstance(reason, TimeoutError)
            text = f"no answer in {timeout:g} s" if timed_out else f"{type(reason).__name__}: {reason}"
            raise _LaterError(text[:_SHOWN]) from None
        except ValueError as error:  # a key with a line break in it; its text must not be repeated
            raise UserError(
                f"the request cannot be sent ({type(error).__name__})", f"Check {self.key_variable}"
            ) from None
        raise AssertionError("unreachable")

    def _judge(self, code: int, retry_after: str | None, said: str) -> None:
        """Raise what an HTTP error means for this request."""
        text = self._without_key(f"HTTP {code}{': ' if said else ''}{said}")
        if code in _AGAIN or code >= 500:
            raise _LaterError(text, _seconds(retry_after))
        if code == 400 and "max_completion_tokens" in said and self._limit_name == "max_tokens":
            self._limit_name = "max_completion_tokens"  # newer hosted models insist on this name
            raise _LaterError(text, 0.0)
        if code in _HOPELESS:
            remedy = (
                f"Check the URL and --endpoint-model {self.model}"
                if code == 404
                else f"Set the API key in the variable {self.key_variable}, or name another with --api-key-env"
            )
            raise UserError(f"{self.url} refuses ({text})", remedy)
        raise _RefusedError(text)

    def _without_key(self, text: str) -> str:
        """Servers like to quote the key they did not accept."""
        secret = os.environ.get(self.key_variable)
        return text.replace(secret, "***") if secret else text

    # --- waiting -----------------------------------------------------------------------------------------------

    def _wait(self, job: Job, attempt: int) -> bool:
        """Exponential backoff; the jitter spreads requests that failed together. True if work was stopped meanwhile."""
        jitter = 0.5 + key(job.key, "retry", attempt) / 2**63
        return self._stopped.wait(min(self.first_wait * 2.0 ** (attempt - 1), _LONGEST_WAIT) * jitter)

    def _close_gate(self, seconds: float) -> None:
        with self._gate:
            self._not_before = max(self._not_before, time.monotonic() + min(seconds, _LONGEST_RETRY_AFTER))

    def _pass_gate(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._stopped.wait(left):
            pass


def _read(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, in the time that is left: a socket's own limit starts anew with every byte."""
    parts: list[bytes] = []
    size = 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > _LARGEST_REPLY:
            raise _LaterError(f"a reply of more than {_LARGEST_REPLY >> 20} MiB")
    if reply.length:  # fewer bytes than were announced
        raise _LaterError("the reply was cut")
    return b"".join(parts)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        raise _LaterError("the reply is not JSON") from None
    if not isinstance(reply, dict):
        raise _LaterError("the reply is not an object")
    return reply


def _completion(reply: dict[str, Any]) -> Completion:
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(content, str) or not isinstance(thinking, str):
            raise TypeError
    except (AttributeError, IndexError, KeyError, TypeError):
        raise _LaterError("the reply is no chat completion") from None
    if thinking:  # servers that take the thinking apart; unfinished thinking must not look finished
        content = f"<think>{thinking}" + (f"</think>{content}" if content else "")
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Completion(
        text=content.encode("utf-8", "replace").decode(),  # JSON can carry half characters, files cannot
        tokens=tokens if isinstance(tokens, int) else None,
        finish=str(choice.get("finish_reason") or "stop"),
    )


def _said(error: urllib.error.HTTPError) -> str:
    """The server's own words, on one line."""
    try:
        raw = error.read(4096).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        inner = json.loads(raw)
        inner = inner.get("error", inner)
        raw = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(raw.split())[:_SHOWN]


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` as seconds from now: a number or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
