"""The rules of proof.py in C++: compiled here alone, and compared with Python's."""

from __future__ import annotations

import functools
import hashlib
import hmac
import http.client
import importlib.util
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.horovod_build import changes

HEADER = changes.ROOT / "added/horovod/common/hvdtrain_proof.h"
# Each line of the input is a question, its words in hex; each line of the output is the answer to one.
PROGRAM = """
#include "hvdtrain_proof.h"
#include <iostream>
#include <sstream>

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 1; i < hex.size(); i += 2) {  // after an 'x': no word is empty
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream text(line);
    std::string kind, word;
    std::vector<std::string> words;
    text >> kind;
    while (text >> word) {
      words.push_back(FromHex(word));
    }
    try {
      if (kind == "sha256") {
        std::cout << hvdtrain::Hex(hvdtrain::Sha256Of(words.at(0)));
      } else if (kind == "hmac") {
        std::cout << hvdtrain::Hex(hvdtrain::Hmac(words.at(0), words.at(1)));
      } else if (kind == "key") {
        std::cout << hvdtrain::Hex(hvdtrain::JobKey());
      } else if (kind == "nonce") {
        std::cout << hvdtrain::Hex(hvdtrain::RandomBytes(16));
      } else if (kind == "same") {
        std::cout << hvdtrain::IsSame(words.at(0), words.at(1));
      } else if (kind == "request") {
        for (const auto& header :
             hvdtrain::RequestHeaders(words.at(0), words.at(1), words.at(2), words.at(3), words.at(4))) {
          std::cout << header << "|";
        }
      } else if (kind == "answer") {
        std::cout << hvdtrain::IsAnswer(words.at(0), words.at(1), std::stoi(words.at(2)), {words.at(3), words.at(4)},
                                        words.at(5));
      }
    } catch (const std::exception& problem) {
      std::cout << "error: " << problem.what();
    }
    std::cout << "\\n";
  }
}
"""
COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
spec = importlib.util.spec_from_file_location("proof", changes.ROOT / "added/horovod/runner/common/util/proof.py")
assert spec
assert spec.loader
proof = importlib.util.module_from_spec(spec)
spec.loader.exec_module(proof)
KEY = bytes(range(32))

texts_like_a_key = st.one_of(
    st.text("0123456789abcdefABCDEF", min_size=62, max_size=66),
    st.text("0aF \t\n\x0b-+x.g\u0660\xe9", min_size=1, max_size=66),
    st.builds(
        lambda digits, place, odd: digits[:place] + odd + digits[place:],
        st.text("09afAF", min_size=62, max_size=64), st.integers(0, 64), st.text(" \t\n_-xX:g", max_size=2),
    ),
)  # fmt: skip
header_names = st.sampled_from(["X-Horovod-Proof", "x-horovod-proof", "X-HOROVOD-PROOF", "X-Horovod-Proo", "Server"])
spaces = st.text(" \t", max_size=2)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory):
    """Return what asks the compiled program questions, (kind, *bytes) each, and returns its answers."""
    if not COMPILER:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("proof")
    (folder / "ask.cc").write_text(PROGRAM)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    command = [COMPILER, "-std=c++14", "-O1", *warnings, f"-I{HEADER.parent}", "ask.cc", "-o", "ask"]
    subprocess.run(command, cwd=folder, check=True)
    return functools.partial(_ask, folder / "ask")


def _ask(program: Path, *questions: tuple[str | bytes, ...], **environment: str) -> list[str]:
    lines = [" ".join([str(kind), *("x" + bytes(word).hex() for word in words)]) for kind, *words in questions]  # type: ignore[arg-type]
    done = subprocess.run(
        [program], input="\n".join(lines) + "\n", env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_digests_are_pythons_at_every_length(ask) -> None:
    texts = [bytes((7 * i + n) % 256 for i in range(n)) for n in (*range(201), 1 << 20)]
    assert ask(*(("sha256", text) for text in texts)) == [hashlib.sha256(text).hexdigest() for text in texts]
    keys = [KEY, b"", b"k" * 64, b"k" * 65]
    pairs = [(keys[n % 4], text) for n, text in enumerate(texts)]
    expected = [hmac.new(key, text, hashlib.sha256).hexdigest() for key, text in pairs]
    assert ask(*(("hmac", *pair) for pair in pairs)) == expected


def test_the_key_is_read_as_python_reads_it(ask) -> None:
    assert ask(("key",), HVDTRAIN_JOB_KEY=KEY.hex()) == [KEY.hex()]
    assert ask(("key",), HVDTRAIN_JOB_KEY=KEY.hex().upper()) == [KEY.hex()]
    assert ask(("key",), HVDTRAIN_JOB_KEY="") == [""]
    for wrong in ("ab", "z" * 64, KEY.hex() + "00", "0x" + KEY.hex()[2:]):
        (said,) = ask(("key",), HVDTRAIN_JOB_KEY=wrong)
        assert "must be 64 hex digits" in said
        assert wrong not in said


def test_no_nonce_comes_twice(ask) -> None:
    nonces = ask(*[("nonce",)] * 1000)
    assert len(set(nonces)) == 1000
    assert {len(nonce) for nonce in nonces} == {32}


def test_texts_are_the_same_only_if_every_byte_is(ask) -> None:
    pairs = [(b"abc", b"abc"), (b"abc", b"abd"), (b"", b""), (b"", b"a"), (b"abc", b"ab")]
    assert ask(*(("same", *pair) for pair in pairs)) == ["1", "0", "1", "0", "0"]


def test_python_accepts_the_request_that_cpp_proves(ask) -> None:
    for method, path, body in (("GET", "/global/0", b""), ("PUT", "/local_h\xf6st/1", bytes(range(256)) * 9)):
        nonce = "0123456789abcdef" * 2
        (lines,) = ask(("request", KEY, nonce.encode(), method.encode(), path.encode(), body))
        headers = dict(line.split(": ") for line in lines.strip("|").split("|"))
        assert headers[proof.NONCE] == nonce
        assert proof.is_request(KEY, method, path, headers)
        assert proof.is_body(headers, body)
        assert not proof.is_request(bytes(32), method, path, headers)


def test_cpp_accepts_the_answer_that_python_proves_and_no_other(ask) -> None:
    sent = proof.request_headers(KEY, "GET", "/global/0")
    nonce = sent[proof.NONCE].encode()
    (header,) = proof.answer_headers(KEY, sent, 200, b"body").items()
    right = ": ".join(header).encode()
    other = b"Content-Length: 4"

    def question(*, key=KEY, nonce=nonce, status=b"200", first=other, second=right, body=b"body"):
        return ("answer", key, nonce, status, first, second, body)

    lower = right.replace(b"X-Horovod-Proof: ", b"x-horovod-proof:")
    accepted = [question(), question(first=right, second=other), question(second=lower), question(second=right + b" ")]
    refused = [
        question(key=bytes(32)),
        question(nonce=b"0" * 32),
        question(status=b"404"),
        question(body=b"bodY"),
        question(second=other),
        question(second=b"X-Horovod-Proof:"),
        question(second=b"X-Horovod-Proof"),
        question(second=right[:-1]),
    ]
    assert ask(*accepted, *refused) == ["1"] * len(accepted) + ["0"] * len(refused)


@settings(max_examples=100, deadline=None)
@given(text=texts_like_a_key)
def test_what_is_a_key_in_python_is_one_in_cpp_and_nothing_else(ask, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(proof.VARIABLE, text)
        try:
            expected = proof.job_key().hex()
        except RuntimeError:
            expected = "error: HVDTRAIN_JOB_KEY must be 64 hex digits"
    (said,) = ask(("key",), HVDTRAIN_JOB_KEY=text)
    assert said.partition(",")[0] == expected


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, int, tuple[str, str], bytes]:
    """A nonce, a status, two lines of a head and a body: an answer as Python proves it, or not quite."""
    nonce, status, body = draw(st.text("09af", max_size=33)), draw(st.integers(0, 999)), draw(st.binary(max_size=70))
    (right,) = proof.answer_headers(KEY, {proof.NONCE: nonce}, status, body).values()
    values = st.one_of(
        st.just(right),
        st.sampled_from([right.upper(), right[:-1], right + "0", f"{right[:9]} {right[9:]}", f"{right}, {right}", ""]),
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=70),
    )
    line = st.builds("{}:{}{}{}".format, header_names, spaces, values, spaces)
    if draw(st.integers(0, 4)) == 0:
        status += 1
    return nonce, status, (draw(line), draw(line)), body


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases=st.lists(answers(), min_size=20, max_size=40))
def test_both_accept_the_same_answers_whatever_their_heads_hold(ask, cases) -> None:
    asked, expected = [], []
    for nonce, status, lines, body in cases:
        raw = [line.encode("latin-1") for line in lines]
        asked.append(("answer", KEY, nonce.encode(), str(status).encode(), *raw, body))
        head = http.client.parse_headers(io.BytesIO(b"".join(line + b"\r\n" for line in (*raw, b""))))
        expected.append(str(int(proof.is_answer(KEY, {proof.NONCE: nonce}, status, head, body))))
    assert ask(*asked) == expected


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.binary(max_size=40), st.text("09af", min_size=32, max_size=32), st.sampled_from(["GET", "PUT"]),
                  st.text("/abz019_.-%", max_size=30), st.binary(max_size=130)),
        min_size=10, max_size=20,
    )
)  # fmt: skip
def test_python_accepts_every_request_that_cpp_proves(ask, requests) -> None:
    said = ask(*(("request", k, nonce.encode(), m.encode(), path.encode(), b) for k, nonce, m, path, b in requests))
    for (key, nonce, method, path, body), text in zip(requests, said, strict=True):
        head = http.client.parse_headers(io.BytesIO(text.replace("|", "\r\n").encode() + b"\r\n"))
        assert head[proof.NONCE] == nonce
        assert proof.is_request(key, method, path, head)
        assert proof.is_body(head, body)
        assert not proof.is_request(key + b"x", method, path, head)
