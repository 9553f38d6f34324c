"""The HTTP server gives the results of the Python API, to many clients at once, within limits; it stops cleanly."""

import asyncio
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import error_message
from http_server import ask, running_server
from synthetic import write_choices, write_questions, write_rows, write_tags

import electra
from electra.finetuning.config import TaskConfig
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.serving import server as server_module
from electra.serving.server import STATIC, count_characters
from electra.serving.service import Service

WORDS = ("the", "big", "cat", "sat", "on", "mat", "dog", "ran", "house", "[MASK]")
WRITERS = {"choice": write_choices, "tags": write_tags, "question-answering": write_questions}


def random_text(generator: random.Random) -> str:
    """A text with a [MASK], also longer than the model reads."""
    return " ".join(["[MASK]", *(generator.choice(WORDS) for _ in range(generator.randint(0, 20)))])


@pytest.fixture(scope="module")
def model(finished_run):
    return electra.load(finished_run, device="cpu")


@pytest.fixture(scope="module")
def server(model):
    with running_server(Service(model, batch_tokens=256)) as running:
        yield running


def held_service(model) -> tuple[Service, threading.Event, threading.Event]:
    """A service that computes when it is allowed to, and tells when it has begun."""
    service = Service(model, batch_tokens=256)
    has_begun, may_end, compute = threading.Event(), threading.Event(), service.compute

    def held_compute(key, items):
        has_begun.set()
        assert may_end.wait(30)
        return compute(key, items)

    service.compute = held_compute
    return service, has_begun, may_end


def test_results_equal_those_of_the_python_api(server, model):
    generator = random.Random(0)
    texts = [random_text(generator) for _ in range(30)]
    status, answer = server.ask("/detect", {"texts": texts})
    assert status == 200
    for text, result in zip(texts, answer["results"], strict=True):
        expected = model.detect(text)
        assert (result["tokens"], result["is_truncated"]) == (expected.tokens, expected.is_truncated)
        assert result["replaced"] == pytest.approx(expected.replaced, abs=2e-4)
    status, answer = server.ask("/fill", {"texts": texts, "count": 3})
    assert status == 200
    for text, result in zip(texts, answer["results"], strict=True):
        expected = model.fill(text, count=3)
        assert result["tokens"] == expected.tokens
        assert [mask["position"] for mask in result["masks"]] == [mask.position for mask in expected.masks]
        for mask, of_api in zip(result["masks"], expected.masks, strict=True):
            assert list(mask["tokens"].values()) == pytest.approx(list(of_api.tokens.values()), abs=2e-4)
    for pooling in ("mean", "cls", "max"):
        _, answer = server.ask("/embed", {"texts": texts, "pooling": pooling})
        vectors = model.embed(texts, pooling=pooling).tolist()
        for result, vector in zip(answer["results"], vectors, strict=True):
            assert result["vector"] == pytest.approx(vector, abs=1e-4)
    [*_, truncated] = server.ask("/embed", {"texts": ["the cat", "cat " * 100]})[1]["results"]
    assert truncated["is_truncated"]


def test_requests_in_the_documentation_have_the_results_that_it_shows(server, finetuned):
    page = (Path(__file__).parent.parent / "docs/serving.md").read_text()
    requests = re.findall(r"^curl localhost:8000/(\w+) .*?-d '(.*?)'\n# ([^\n]*)$", page, re.MULTILINE | re.DOTALL)
    assert len(requests) == page.count("curl localhost")
    with running_server(Service(electra.load(finetuned.output, device="cpu"), batch_tokens=128)) as predicting:
        for method, body, shown in requests:
            if "rows" in (request := json.loads(body)):
                continue  # of another kind of task
            status, answer = (predicting if method == "predict" else server).ask(f"/{method}", request)
            assert status == 200, answer
            assert [name for name in answer["results"][0] if f'"{name}":' not in shown and "(" not in name] == []


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_of_task_predict(encoder_folder, tmp_path, kind):
    rows = tmp_path / f"rows.{'conll' if kind == 'tags' else 'jsonl'}"
    WRITERS[kind](rows, 20, seed=0) if kind in WRITERS else write_rows(rows, kind, 20, seed=0)
    task = define_task(TaskConfig(train=rows, kind=kind))
    pretrained = load_pretrained(encoder_folder)
    (tmp_path / "model").mkdir()
    model = KINDS[kind].model(task)(pretrained.encoder, task.num_labels)
    save_finetuned_model(model, task, 32, tmp_path / "model", encoder_folder)
    predictor = electra.load(tmp_path / "model", device="cpu")
    values = [row.values for row in KINDS[kind].read_rows(rows)]
    expected = predictor.predict(values)
    with running_server(Service(predictor, batch_tokens=128)) as server:
        assert server.ask("/health")[1]["methods"] == ["predict"]
        status, answer = server.ask("/predict", {"rows": values})
        schemas = server.ask("/openapi.json")[1]["components"]["schemas"]
        example_status, _ = server.ask("/predict", schemas["PredictRequest"]["examples"][0])
    assert (status, example_status) == (200, 200)
    assert [list(result) for result in answer["results"]] == [[*result, "is_truncated"] for result in expected]
    assert [result["prediction"] for result in answer["results"]] == [
        pytest.approx(result["prediction"], rel=1e-4) if kind == "regression" else result["prediction"]
        for result in expected
    ]


@pytest.mark.parametrize(("cell", "characters"), [("four", 4), (["a", "four"], 7), ([["a"], []], 4), (1, 0), ([1], 1)])
def test_the_characters_of_lists_are_counted_with_a_space_for_each_item(cell, characters):
    assert count_characters(cell) == characters


def test_lists_in_rows_have_a_limit_and_count_for_the_size_of_batches(finetuned):
    predictor = electra.load(finetuned.output, device="cpu")
    with running_server(Service(predictor, batch_tokens=128), max_characters=100) as server:
        sizes, submit = [], server.app.state.batcher.submit
        server.app.state.batcher.submit = lambda key, items, size: sizes.append(size) or submit(key, items, size)
        status, answer = server.ask("/predict", {"rows": [{"text": "the cat", "words": ["a"] * 60}]})
        assert (status, answer["error"]) == (422, "a text has 120 characters; at most 100 are allowed")
        server.ask("/predict", {"rows": [{"text": "the cat", "words": ["a"] * 40}]})
        assert sizes == [7 + 80]


def test_texts_are_predicted_like_rows(finetuned):
    predictor = electra.load(finetuned.output, device="cpu")
    texts = ["the big cat sat on the mat .", "the red dog sat ."]
    with running_server(Service(predictor, batch_tokens=128)) as server:
        expected = [prediction | {"is_truncated": False} for prediction in predictor.predict(texts)]
        assert server.ask("/predict", {"texts": texts})[1]["results"] == expected
        assert server.ask("/predict", {"texts": texts, "rows": []})[0] == 422
        assert server.ask("/predict", {})[1]["error"] == "a request needs either texts or rows"
        status, answer = server.ask("/predict", {"rows": [{"other": "a"}]})
        assert (status, answer["error"][:31]) == (422, "line 1: no column 'text'; the c")
        assert "it has /predict" in server.ask("/detect", {"texts": texts})[1]["error"]


def test_concurrent_requests_are_batched_and_not_mixed_up(server, model):
    """64 clients send texts of different lengths and read the tokens of their own text."""

    def ask_for(number: int) -> bool:
        generator = random.Random(number)
        texts = [random_text(generator) for _ in range(generator.randint(1, 5))]
        method = generator.choice(["detect", "fill"])
        status, answer = server.ask(f"/{method}", {"texts": texts})
        expected = [getattr(model, method)(text) for text in texts]
        return status == 200 and [each["tokens"] for each in answer["results"]] == [each.tokens for each in expected]

    with ThreadPoolExecutor(64) as clients:
        assert all(clients.map(ask_for, range(256)))
    metrics = server.ask("/metrics")[1]
    batches = int(re.search(r"electra_batch_texts_count (\d+)", metrics)[1])
    texts = float(re.search(r"electra_batch_texts_sum (\S+)", metrics)[1])
    assert texts > 1.5 * batches
    assert 'electra_requests_total{endpoint="/detect",status="200"}' in metrics


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/detect", b'{"texts": ["a}', 422, "not valid JSON: Unterminated string starting at (character 11)"),
        ("/detect", b'{"texts": ["\xff"]}', 422, "not valid JSON in UTF-8"),
        ("/detect", b"[" * 100_000, 422, "nested too deeply"),
        ("/detect", b"[]", 422, "must be a JSON object"),
        ("/detect", {"texts": "the cat"}, 422, "texts: "),
        ("/detect", {"texts": [1]}, 422, "texts.0: "),
        ("/detect", {"texts": []}, 422, "texts: "),
        ("/detect", {"texts": ["a"], "count": 1}, 422, "unknown field count; /docs lists"),
        ("/detect", {"texts": ["a"] * 65}, 422, "texts: "),
        ("/detect", {"texts": ["a" * 20_001]}, 422, "texts.0: "),
        ("/detect", {"texts": ["a\ud800"]}, 422, "unicode"),
        ("/fill", {"texts": ["[MASK]"], "count": 0}, 422, "count: "),
        ("/fill", {"texts": ["the cat"]}, 422, "the text has no [MASK]"),
        ("/fill", {"texts": ["the [MASK]", "the cat"]}, 422, "text 2 has no [MASK]"),
        ("/embed", {"texts": ["a"], "pooling": "sum"}, 422, "pooling: "),
        ("/predict", {"texts": ["a"]}, 404, "has no /predict"),
        ("/other", {"texts": ["a"]}, 405, "does not take POST"),
        ("/other", None, 404, "there is no /other"),
        ("/detect", None, 405, "does not take GET; use POST"),
        ("/predict", None, 404, "there is no /predict"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(server, path, body, status, message):
    actual, answer = server.ask(path, body)
    assert list(answer) == ["error"]
    assert message in answer["error"]
    assert actual == status


def test_large_requests_are_refused_before_they_are_stored(model):
    with running_server(Service(model, 256), max_body=1000) as server:
        assert server.ask("/detect", b" " * 1001)[0] == 413
        assert server.ask("/detect", b'{"texts": ["a"]}' + b" " * 900)[0] == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as endless:
            endless.sendall(b"POST /detect HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            with ThreadPoolExecutor(1) as reader:
                read = reader.submit(endless.recv, 1000)
                while not read.done():
                    try:
                        endless.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                    except OSError:
                        break
                answer = read.result()
            assert b" 413 " in answer


def test_a_full_queue_is_answered_with_429(model):
    service, has_begun, may_end = held_service(model)
    with running_server(service, max_queue=3) as server, ThreadPoolExecutor(4) as clients:
        running = clients.submit(server.ask, "/detect", {"texts": ["the cat"]})
        assert has_begun.wait(10)
        waiting = clients.submit(server.ask, "/detect", {"texts": ["a", "b", "c"]})
        while "electra_queued_texts 3" not in server.ask("/metrics")[1]:
            time.sleep(0.01)
        status, answer = server.ask("/detect", {"texts": ["a"]})
        assert (status, answer["error"]) == (429, "3 texts are waiting already; try again in a second")
        assert server.ask("/health")[0] == 200
        may_end.set()
        assert (running.result()[0], waiting.result()[0]) == (200, 200)


def test_slow_clients_are_disconnected(model):
    """One sends no complete head, another no complete body; a third waits between two requests."""
    head = b"POST /detect HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 16\r\n\r\n"
    with running_server(Service(model, 256), client_timeout=0.3) as server:
        for sent, expected in ((b"POST /det", b""), (head + b"{", b" 408 "), (b"", b"")):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
                slow.sendall(sent)
                answer = b"".join(iter(lambda slow=slow: slow.recv(4096), b""))
            assert expected in answer
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
            slow.sendall(head + b'{"texts": ["a"]}')
            assert b" 200 " in slow.recv(4096)
            slow.sendall(b"GET /hea")
            rest = b"".join(iter(lambda: slow.recv(4096), b""))  # perhaps the end of the first answer
            assert b"HTTP/1.1" not in rest


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
def test_clients_that_read_nothing_of_a_response_are_disconnected(model, header):
    service, body = Service(model, 256), b'{"texts": ["a"]}'
    service.functions["embed"] = lambda texts, pooling: [{"vector": [0.5] * 2_000_000, "is_truncated": False}]
    head = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 16\r\n"
    with running_server(service, client_timeout=0.3) as server:
        assert len(server.ask("/embed", {"texts": ["a"]})[1]["results"][0]["vector"]) == 2_000_000
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(head + header + b"\r\n" + body)
            deadline = time.monotonic() + 20
            while 'endpoint="/embed",status="200"} 2' not in server.ask("/metrics")[1]:
                assert time.monotonic() < deadline
            while server.server.server_state.connections and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not server.server.server_state.connections


def test_clients_that_read_slowly_get_all_of_several_responses(model):
    service, body = Service(model, 256), b'{"texts": ["a"]}'
    service.functions["embed"] = lambda texts, pooling: [{"vector": [0.5] * 1_000_000, "is_truncated": False}]
    head = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 16\r\n\r\n"
    with (
        running_server(service, client_timeout=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow,
    ):
        slow.sendall(3 * (head + body))
        received = 0
        while received < 3 * 4_000_000:
            part = slow.recv(200_000)
            assert part
            received += len(part)
            time.sleep(0.02)


def test_a_failure_is_counted_as_such(model):
    service = Service(model, 256)
    service.functions["detect"] = lambda texts, option: 1 / 0
    with running_server(service) as server:
        assert server.ask("/detect", {"texts": ["a"]})[0] == 500
        assert 'endpoint="/detect",status="500"} 1' in server.ask("/metrics")[1]


def test_after_a_panic_of_the_tokenizers_library_other_requests_are_answered(model):
    class PanicException(BaseException):
        """As the library raises it."""

    def detect(texts, option):
        if "bad" in texts:
            raise PanicException("regular expression")
        return [{"tokens": []} for _ in texts]

    service = Service(model)
    service.functions["detect"] = detect
    with running_server(service) as server:
        status, answer = server.ask("/detect", {"texts": ["bad"]}, timeout=10)
        assert (status, answer["error"][:34]) == (422, "the tokenizers library panicked (r")
        assert server.ask("/detect", {"texts": ["good"]}, timeout=10)[0] == 200


def test_texts_of_clients_that_have_gone_are_not_computed(model):
    service, has_begun, may_end = held_service(model)
    body = json.dumps({"texts": ["the cat"]}).encode()
    head = b"POST /detect HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with running_server(service) as server, ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.ask, "/detect", {"texts": ["the dog"]})
        assert has_begun.wait(10)
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(head % len(body) + body)
            while server.app.state.batcher.queued != 1:
                time.sleep(0.01)
        while server.app.state.batcher.queued:
            time.sleep(0.01)
        may_end.set()
        assert running.result()[0] == 200


def accepts_connections(port: int) -> bool:
    try:
        return ask(port, "/health", timeout=5)[0] == 200
    except OSError:
        return False


def test_running_requests_finish_when_the_server_stops(model):
    service, has_begun, may_end = held_service(model)
    with running_server(service) as server, ThreadPoolExecutor(2) as clients:
        running = clients.submit(server.ask, "/detect", {"texts": ["the cat"]})
        assert has_begun.wait(10)
        waiting = clients.submit(server.ask, "/detect", {"texts": ["the dog"]})
        while server.app.state.batcher.queued != 1:
            time.sleep(0.01)
        server.stop()
        while accepts_connections(server.port):
            time.sleep(0.01)
        assert not running.done()
        may_end.set()
        assert (running.result()[0], waiting.result()[0]) == (200, 200)


def test_the_documentation_needs_no_other_host(server):
    for name in ("docs", "docs.js", "docs.css"):
        assert server.ask(f"/{name}")[0] == 200
    for file in STATIC.iterdir():
        assert not re.search(r"(src|href)=.?(https?:)?//|url\(|import .* from|fetch\(.http", file.read_text())
    description = server.ask("/openapi.json")[1]
    assert {"/detect", "/fill", "/embed", "/health", "/metrics"} == description["paths"].keys()
    for path in ("detect", "fill", "embed"):
        [example] = description["components"]["schemas"][f"{path.capitalize()}Request"]["examples"]
        assert server.ask(f"/{path}", example)[0] == 200


def test_a_folder_of_files_is_the_page(model, tmp_path):
    from starlette.staticfiles import StaticFiles

    (tmp_path / "index.html").write_text("the page")
    (tmp_path / "model.wasm").write_text("x")
    with running_server(Service(model, 256)) as server:
        assert "/docs" in server.ask("/")[1]
        server.app.state.page = StaticFiles(directory=tmp_path, html=True)
        assert server.ask("/") == (200, "the page")
        assert server.ask("/model.wasm") == (200, "x")
        assert server.ask("/../secret")[0] == 404
        assert server.ask("/health")[0] == 200


def test_a_server_does_not_fetch_the_libraries_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_module, "has_node_packages", lambda: False)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    asyncio.run(server_module.make_page(None, tmp_path / "model", tmp_path / "page"))
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("fetch them: python -m electra.exporting.node_packages")


def test_predictions_say_whether_the_text_was_truncated(finetuned):
    with running_server(Service(electra.load(finetuned.output, device="cpu"), batch_tokens=128)) as server:
        _, answer = server.ask("/predict", {"texts": ["the cat", "the cat " * 100]})
    assert [each["is_truncated"] for each in answer["results"]] == [False, True]


def test_load_balancers_may_check_health_by_head(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("HEAD", "/health")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_wrong_settings_are_reported(finished_run, tmp_path, capsys):
    run = finished_run
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "address already in use" in error_message(f"serve --model {run} --port {port}", capsys)
    assert "--port is 70000" in error_message(f"serve --model {run} --port 70000", capsys)
    assert "has no ONNX files" in error_message(f"serve --model {run} --backend onnx --port 0", capsys)
    assert "--int8 needs a folder" in error_message(f"serve --model {run} --int8 --port 0", capsys)
    assert "there is no folder" in error_message(f"serve --model {tmp_path}/missing --port 0", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_command(finished_run, number):
    command = [sys.executable, "-m", "electra", "serve", "--model", str(finished_run), "--port", "0", "--no-page"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", process.stderr.readline())[1])
    assert ask(port, "/detect", {"texts": ["the cat"]})[0] == 200
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "stopped after 1 request\n", "")


@pytest.mark.slow
def test_ten_thousand_requests_of_all_sorts(finished_run):
    """Malformed, huge, slow and aborted ones among them; every other one gets its own result, and memory is flat."""
    command = [sys.executable, "-m", "electra", "serve", "--model", str(finished_run), "--port", "0", "--no-page"]
    command += ["--client-timeout", "5", "--max-body", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", process.stderr.readline())[1])
    tokenizer = electra.load(finished_run, device="cpu").tokenizer.library
    try:
        with ThreadPoolExecutor(32) as clients:
            memory = []
            for thousand in range(10):
                numbers = range(1000 * thousand, 1000 * (thousand + 1))
                outcomes = list(clients.map(lambda number: send_any(port, number, tokenizer), numbers))
                assert all(outcomes)
                metrics = ask(port, "/metrics")[1]
                memory.append(int(re.search(r"process_resident_memory_bytes (\d+)", metrics)[1]))
        assert memory[-1] < 1.1 * memory[2], memory
        assert "electra_queued_texts 0" in metrics
        assert process.poll() is None
    finally:
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=60)[1]


def send_any(port: int, number: int, tokenizer) -> bool:
    """Send a request of some sort; whether the answer is right."""
    generator = random.Random(number)
    sort = generator.random()
    text = random_text(generator)
    if sort < 0.1:
        return ask(port, "/fill", generator.choice([b"{", b"\xff\x00", b"[" * 1000, b"null", b'{"texts": [null]}']))[
            0
        ] in (400, 422)
    if sort < 0.13:
        return ask(port, "/detect", b" " * 200_000)[0] == 413
    if sort < 0.2:
        return send_and_leave(port, text, generator)
    method = generator.choice(["detect", "fill"])
    status, answer = ask(port, f"/{method}", {"texts": [text]})
    tokens = tokenizer.encode(text).tokens
    expected = tokens if len(tokens) <= 16 else [*tokens[:15], "[SEP]"]
    return status == 200 and answer["results"][0]["tokens"] == expected


def send_and_leave(port: int, text: str, generator: random.Random) -> bool:
    """Send a part of a request, or all of it, slowly, and close the connection without reading."""
    body = json.dumps({"texts": [text] * 10}).encode()
    head = b"POST /detect HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    request = head % len(body) + body
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        cut = generator.randrange(len(request) + 1)
        connection.sendall(request[: cut // 2])
        time.sleep(generator.random() / 10)
        connection.sendall(request[cut // 2 : cut])
    return True
