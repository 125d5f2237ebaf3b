"""No secret is shown or kept, and what only looks like one stays readable."""

from __future__ import annotations

import json
import shlex
import string
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain.system import redact

SECRET = "qN7-tv_Zx.0w+R"

# Command lines; a secret takes the place of PLANTED.
WORDS = [
    ["--token", "PLANTED"],
    ["--pat", "PLANTED"],
    ["--api-key=PLANTED"],
    ["--wandb-key", "PLANTED"],
    ["-x", "HF_TOKEN=PLANTED"],
    ["--pw", "PLANTED"],
    ['--cfg={"api_key": "PLANTED"}'],
    ['--cfg={"logger": {"auth": {"user": "me", "pass": "PLANTED"}}}'],
    ["--override=logger.api_key=PLANTED"],
    ["+logger.apiKey=PLANTED"],
    ["db.password=PLANTED"],
    ["--set", "secret=PLANTED,lr=1"],
    ["--url", "https://me:PLANTED@host/x"],
    ["--data=https://host/x?sig=PLANTED&n=1"],
    ["--env", '[{"name": "HF_TOKEN", "value": "PLANTED"}]'],
    ["--header", "Authorization: Bearer PLANTED"],
    ["--cfg", "{api_key: PLANTED, lr: 1}"],
    ["--cfg", "{'password': 'PLANTED', 'lr': 1}"],
    ["bash", "-c", "export DB_PASS=PLANTED; python x.py"],
    ["bash", "-c", "python x.py --client-secret PLANTED --lr 1"],
    ["--yaml", "lr: 1\npassword: PLANTED and more\n"],
    ["--connection-string", "Server=h;AccountKey=PLANTED"],
    ["--conn=Server=h;AccountKey=PLANTED;Port=1"],
    ["--github-pat", "PLANTED"],
    ["--cfg", '{"nested": "{\\"token\\": \\"PLANTED\\"}"}'],
    ["--key", "PLANTED"],
    ["--smtp_pass", "PLANTED"],
    ["--JOB_KEY_ID=PLANTED"],
]  # fmt: skip
SHOWN = [
    ["train.py", "--tokenizer", "bert-base", "--num_tokens=512", "--author", "me", "--max-tokens", "8"],
    ["--key_dim=64", "--keyboard", "qwerty", "--pass", "2", "--passes=3", "--pad_token", "<pad>", "--eos_token_id=2"],
    ["--sort-key", "length", "--image_key=jpg", "--monkey", "patch", "--pattern=*.tar", "--patience", "5"],
    ['--cfg={"tokenizer": "bert", "key_padding_mask": true, "token": null, "use_auth_token": true, "seed": 7}'],
    ["--override=model.key_dim=64", "--out=/tmp/passes/x", "--data", "https://host/x?n=1", "a=b", "{x: 1, y: 2}"],
    ["--notes", "the key: see above. std::token::next, torch.nn.Module", "--compass=n", "sk-learn-contrib-all",
     "hf_hub_download"],
    ["--password-length=12", "--token-dropout=0.1", "--secretary", "bob", "--public-key", "id.pub", "--forward_pass=1"],
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_secret_on_a_command_line_is_hidden(words):
    said = [word.replace("PLANTED", SECRET) for word in words]
    shown = redact.words(["train.py", "--lr", "1", *said, "--epochs", "3"])
    assert SECRET not in json.dumps(shown)
    assert shown[:3] == ["train.py", "--lr", "1"]
    assert shown[-2:] == ["--epochs", "3"]
    assert redact.words(shown) == shown


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_secret_in_a_document_is_hidden(words):
    said = [word.replace("PLANTED", SECRET) for word in words]
    for kept in ({"argv": said, "n": 1}, {"line": shlex.join(said)}, {"deep": [{"a": (said, None)}]}):
        assert SECRET not in json.dumps(redact.document(kept))


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: words[0])
def test_what_is_no_secret_is_shown(words):
    assert redact.words(words) == words
    assert redact.document({"argv": words})["argv"] == words


def test_a_documents_other_values_keep_their_types():
    kept = {"lr": 0.1, "n": [1, 2.5, None, True], "token": None, "use_auth": False, "num_tokens": 3, "name": "x"}
    assert redact.document(kept) == kept
    assert redact.document({"password": 12345678, "auth": {"user": "me", "n": 1}, "credentials": ["a", "b"]}) == {
        "password": "(hidden)",
        "auth": {"user": "(hidden)", "n": "(hidden)"},
        "credentials": ["(hidden)", "(hidden)"],
    }


@pytest.mark.parametrize(
    "token",
    [
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "hf_abcdefghijklmnopqr",
        "sk-proj-abc123DEF456ghi789",
        "glpat-x9y8z7w6v5",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abc",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_9",
        "Bearer abcdefgh1234",
        "https://hooks.slack.com/services/T00/B00/XXXXYYYY",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_tokens_that_services_issue_are_known_by_their_form(token):
    for shown in (
        redact.words(["--x", token])[1],
        redact.text(f"got {token}, then"),
        redact.document({"x": token})["x"],
    ):
        assert token.split()[-1].rpartition("/")[2] not in shown
        assert "(hidden)" in shown


def test_the_value_of_a_secret_variable_is_hidden_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HVDTRAIN_JOB_KEY", "0123456789abcdef" * 4)
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:correct%20horse@index.example/simple")
    monkeypatch.setenv("GCP_CREDENTIALS", json.dumps({"type": "account", "private_key": "in-the-json-9"}))
    for secret in (SECRET, "0123456789abcdef" * 4, "correct%20horse", "in-the-json-9"):
        assert secret not in redact.text(f"error: {secret} was refused, {quote(secret)}")
        assert secret not in json.dumps(redact.document({"a": [f"x{secret}y"], secret: 1}))
        assert secret not in str(redact.words(["train.py", secret, f"--name=run-{secret}"]))
        assert secret not in str(redact.strings({"token": 0.5, "said": f"<{secret}>"}))
    assert redact.strings({"token": 0.5}) == {"token": 0.5}


def test_a_secret_of_the_command_line_is_hidden_elsewhere_too(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--pat", SECRET, "--override=logger.api_key=abc==def=="])
    assert redact.document({"note": f"by {SECRET}", "cmd": "x abc==def=="}) == {
        "note": "by (hidden)",
        "cmd": "x (hidden)",
    }


@pytest.mark.parametrize(
    "value", ["short", "12345678", "/run/secrets/token", "~/.netrc", "kerberos", "https://host/oauth"]
)
def test_a_word_a_number_a_path_or_an_address_is_no_secret_elsewhere(monkeypatch, value):
    monkeypatch.setenv("SOME_TOKEN", value)
    assert redact.text(f"said {value}") == f"said {value}"
    assert redact.variables({"SOME_TOKEN": value, "OTHER": value}) == {"SOME_TOKEN": "(hidden)", "OTHER": value}


def test_a_long_text_without_names_takes_no_time_worth_telling():
    assert redact.text("x" * 200_000) == "x" * 200_000
    assert redact.text("-a" * 100_000) == "-a" * 100_000
    assert redact.text('{"' * 50_000)
    assert redact.document(json.loads("[" * 400 + "]" * 400))


SECRETS = st.text(string.ascii_letters + string.digits + "!#$%*+-./:;<=>?@^_~| \\\"'{}[],éß", min_size=10, max_size=30)


@given(secret=SECRETS, data=st.data())
def test_a_planted_secret_is_found_in_no_form(secret, data):
    secret = f"Q{secret}7"  # no option, no path
    assume(not any(secret in word for words in (*WORDS, *SHOWN) for word in words))
    name = data.draw(
        st.sampled_from(["password", "api_key", "HF_TOKEN", "pat", "clientSecret", "wandb-key", "db_pass"])
    )
    shape = data.draw(st.sampled_from(["option", "equals", "override", "json", "mapping", "list", "manifest"]))
    as_json = json.dumps({"lr": 1, "inner": [{name: secret}]}, ensure_ascii=data.draw(st.booleans()))
    said = {
        "option": lambda: redact.words(["t.py", f"--{name}", secret, "x"]),
        "equals": lambda: redact.words(["t.py", f"--{name}={secret}", "x"]),
        "override": lambda: redact.words(["t.py", f"--override=a.{name}={secret}", "x"]),
        "json": lambda: redact.words(["t.py", f"--cfg={as_json}", as_json]),
        "mapping": lambda: redact.document({"a": [{name: secret}], "b": f"again {secret}"}),
        "list": lambda: redact.document({name: [secret, {"x": secret}]}),
        "manifest": lambda: redact.document([{"name": name, "value": secret}]),
    }[shape]()
    shown = json.dumps(said, ensure_ascii=False)
    for form in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        assert form not in shown
