"""Request targets: what is served, under which dialect, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, MethodNotAllowed, NotFound
from gateway.values import Api
from gateway.wire.objects import RESPONSE, place_of
from gateway.wire.routes import RouteTable, check_passthrough, dialect_of


@pytest.fixture(scope="module")
def table() -> RouteTable:
    return RouteTable(passthrough_paths=["/custom/api", "/v1/images/*", "/v1/files/*", "/v1/chat/*"])


@pytest.mark.parametrize(
    ("method", "path", "api"),
    [
        ("POST", "/v1/chat/completions", Api.CHAT),
        ("POST", "/v1/completions", Api.COMPLETIONS),
        ("POST", "/v1/responses", Api.RESPONSES),
        ("GET", "/v1/responses/resp_1", Api.RESPONSES),
        ("DELETE", "/v1/responses/resp_1", Api.RESPONSES),
        ("POST", "/v1/responses/resp_1/cancel", Api.RESPONSES),
        ("GET", "/v1/responses/resp_1/input_items", Api.RESPONSES),
        ("POST", "/v1/responses/input_tokens", Api.RESPONSES),
        ("POST", "/v1/messages", Api.MESSAGES),
        ("POST", "/v1/messages/count_tokens", Api.MESSAGES),
        ("POST", "/v1/embeddings", Api.EMBEDDINGS),
        ("POST", "/v1/classify", Api.EMBEDDINGS),
        ("POST", "/v1/rerank", Api.RERANK),
        ("POST", "/v2/rerank", Api.RERANK),
        ("POST", "/rerank", Api.RERANK),
        ("POST", "/v1/score", Api.RERANK),
        ("POST", "/score", Api.RERANK),
        ("POST", "/tokenize", Api.TOKENIZE),
        ("POST", "/detokenize", Api.TOKENIZE),
        ("POST", "/generate", Api.GENERATE),
        ("POST", "/v1/audio/transcriptions", Api.AUDIO),
        ("POST", "/v1/audio/speech", Api.AUDIO),
        ("GET", "/v1/models", Api.MODELS),
        ("HEAD", "/v1/models", Api.MODELS),
        ("GET", "/v1/models/org/model-7b", Api.MODELS),
        ("GET", "/v1/realtime", Api.REALTIME),
        ("PUT", "/custom/api", Api.OTHER),
        ("GET", "/v1/images/image-1/content", Api.OTHER),
        ("DELETE", "/v1/images/a@b:c=d", Api.OTHER),
        ("POST", "/v1/files", Api.OBJECTS),
        ("GET", "/v1/files/file-1/content", Api.OBJECTS),
        ("POST", "/v1/uploads/upload_1/parts", Api.OBJECTS),
        ("POST", "/v1/batches/batch_1/cancel", Api.OBJECTS),
        ("DELETE", "/v1/conversations/conv_1/items/msg_1", Api.OBJECTS),
        ("GET", "/v1/messages/batches/msgbatch_1/results", Api.MESSAGE_BATCHES),
    ],
)
def test_every_operation_has_its_dialect(table: RouteTable, method: str, path: str, api: Api) -> None:
    """Each documented path is served, keeps its path, and speaks one dialect."""
    route = table.match(method, path)
    assert (route.api, route.path, route.target) == (api, path, path)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat///completions//",
        "http://evil.example/v1/chat/completions",
        "http://evil.example//v1/chat/completions/",
        "/v1/chat/completions#fragment",
    ],
)
def test_odd_but_harmless_spellings_reach_the_same_path(table: RouteTable, target: str) -> None:
    """Slashes too many and absolute-form targets are tolerated; the host in the target decides nothing."""
    route = table.match("POST", target)
    assert (route.api, route.target) == (Api.CHAT, "/v1/chat/completions")


def test_query_travels_with_the_normalised_path(table: RouteTable) -> None:
    """Claude Code's `?beta=true` reaches the backend; the path before it is the matched one."""
    assert table.match("POST", "/v1/messages/?beta=true&x=%2e%2e").target == "/v1/messages?beta=true&x=%2e%2e"


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../admin",
        "/v1/chat/completions/..",
        "/./v1/chat/completions",
        "/v1/%2e%2e/admin",
        "/v1/%2E%2e/admin",
        "/v1/%252e%252e/admin",
        "/v1/..%2fadmin",
        "/v1/chat\\..\\completions",
        "/v1/chat/completions%00",
        "/v1/chat/completions\r\nx: y",
        "*",
        "evil.example:443",
        "",
    ],
)
def test_targets_that_try_to_leave_their_path_are_refused(table: RouteTable, target: str) -> None:
    """Dot segments in any encoding, backslashes, controls and non-paths are 400."""
    with pytest.raises(BadRequest):
        table.match("POST", target)


@pytest.mark.parametrize(
    "target",
    ["/", "/v1", "/v1/nothing", "/admin/backends", "/metrics", "/V1/chat/completions", "http://host",
     "/v1/responses/a.b", "/v1/responses/" + "x" * 257, "/v1/chat%2fcompletions"],
)  # fmt: skip
def test_unknown_paths_are_not_found(table: RouteTable, target: str) -> None:
    """What is not in the table does not exist, the gateway's own admin and a backend's control paths too."""
    with pytest.raises(NotFound):
        table.match("GET", target)


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("post", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/responses/resp_1", "GET, HEAD, DELETE"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(
    table: RouteTable, method: str, target: str, allow: str
) -> None:
    """405 names the methods that work; methods are case-sensitive."""
    with pytest.raises(MethodNotAllowed) as caught:
        table.match(method, target)
    assert caught.value.allow == f"{allow}, OPTIONS"


def test_a_lookup_without_method_serves_preflights(table: RouteTable) -> None:
    """OPTIONS needs to know the route without being one of its methods."""
    assert table.lookup("/v1/chat/completions").methods == ("POST",)


def test_only_paths_of_stored_responses_name_a_response() -> None:
    """`/v1/responses/{id}` and what is below it; operations of the API are no ids."""
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        place = place_of(path)
        assert place is not None
        assert (place.kind, place.object_id) == (RESPONSE, "resp_1")
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/chat/completions"):
        assert place_of(path) is None


def test_errors_before_a_route_is_known_have_the_right_shape() -> None:
    """A wrong method or sub-path of Messages is told in Anthropic's dialect, all else in OpenAI's."""
    for target in ("/v1/messages", "/v1/messages/", "//v1/messages/none", "http://h/v1/messages?beta=true"):
        assert dialect_of(target) is Api.MESSAGES
    for target in ("/v1/messagesx", "/v1/chat/completions", "/", "", "*"):
        assert dialect_of(target) is Api.OTHER


def test_the_model_list_is_not_bound_to_a_session(table: RouteTable) -> None:
    """Models are merged over the fleet; every other operation is routed by session."""
    assert not table.match("GET", "/v1/models").is_session_routed
    assert table.match("POST", "/v1/chat/completions").is_session_routed


@given(target=st.text(max_size=60) | st.text(alphabet="/.%2eEfF\\v1chat?#", max_size=60))
def test_any_target_gives_a_clean_route_or_a_client_error(table: RouteTable, target: str) -> None:
    """No input makes another exception, and no served path holds a dot segment, an escape or `//`."""
    try:
        route = table.match("POST", target)
    except (BadRequest, NotFound, MethodNotAllowed):
        return
    assert "//" not in route.path
    assert "%" not in route.path
    assert not {".", ".."} & set(route.path.split("/"))


@pytest.mark.parametrize(
    "target",
    [
        "/v1/images",
        "/v1/images/",
        "/v1/images/%61",
        "/v1/imagesystem",
        "/v1/images/a;b",
        "/v1/files/a.b",
        "/v1/files/%61",
        "/v1/files/a/odd",
        "/v1/files/" + 257 * "a",
    ],
)
def test_an_open_prefix_opens_only_what_is_plainly_below_it(table: RouteTable, target: str) -> None:
    """Escapes and odd characters could mean another path to an engine: they are not passed on."""
    with pytest.raises(NotFound):
        table.match("GET", target)


def test_the_pass_through_list_takes_nothing_from_the_known_apis(table: RouteTable) -> None:
    """A known path below an open prefix keeps its dialect and its methods."""
    assert table.match("POST", "/v1/chat/completions").api is Api.CHAT
    with pytest.raises(MethodNotAllowed):
        table.match("GET", "/v1/chat/completions")


@pytest.mark.parametrize("path", ["/v1/images", "/v1/images/*", "/custom", "/reset_prefix_cache"])
def test_plain_paths_may_pass_through(path: str) -> None:
    """One path, or all that is below one."""
    check_passthrough(path)


@pytest.mark.parametrize(
    "path", ["", "/", "/*", "v1/files", "/v1/../x", "/v1/./x", "/a//b", "/a%2fb", "/a*", "/a/*/b"]
)
def test_other_paths_may_not(path: str) -> None:
    """No list opens everything, and none names what no request can ask for."""
    with pytest.raises(ValueError, match="passthrough_paths"):
        check_passthrough(path)
