"""Which shape of message content a chat template expects: a string, or a list of parts.

The same conversation renders differently in each shape, so this must decide as vLLM does: from the template's
syntax tree (vLLM's `--chat-template-content-format auto`). A template expects parts if it loops over them:

    {% for message in messages %}{% for part in message.content %}        directly, or
    {% macro show(body) %}{% for part in body %}  ...  {{ show(message.content) }}   in a macro, or
    {% set content = message.content %}{% for part in content %}          under this very name
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from jinja2 import nodes


class _NotANameError(Exception):
    """The template binds messages to something other than a plain variable; vLLM then uses strings."""


def wants_parts(template: nodes.Template) -> bool:
    """Whether the template loops over the parts of a message's content."""
    try:
        return any(_content_loops(template, _message_names(template)))
    except _NotANameError:
        return False


def _content_loops(template: nodes.Template, messages: Set[str]) -> Iterator[bool]:
    # nodes have no hash by identity and no link to their parent, hence the ids
    inside = {
        id(loop): macro for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)
    }
    for loop in template.find_all(nodes.For):
        macro = inside.get(id(loop))
        names = _content_parameters(template, macro, messages) if macro else {"content"}
        yield _is_content(loop.iter, messages) or (
            isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        )


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: Set[str]) -> set[str]:
    """The parameters of `macro` that receive a message's content in at least one call."""
    names = [parameter.name for parameter in macro.args]
    filled = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        values = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        filled |= {name for name, value in values if name in names and _is_content(value, messages)}
    return filled


def _message_names(template: nodes.Template) -> set[str]:
    """The loop variables that each hold one message."""
    lists = _names_of_messages(template)
    loops = template.find_all(nodes.For)
    return {_name(loop.target) for loop in loops if _is_variable(loop.iter, lists)}


def _names_of_messages(template: nodes.Template) -> set[str]:
    """`messages`, and the variables to which it, or a slice of it, is assigned."""
    assignments = list(template.find_all(nodes.Assign))
    names = {"messages"}
    while found := {_name(a.target) for a in assignments if _is_variable(a.node, names)} - names:
        names |= found
    return names


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotANameError
    return target.name


def _is_variable(node: nodes.Node, names: Set[str]) -> bool:
    node = _unwrapped(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _is_content(node: nodes.Node, messages: Set[str]) -> bool:
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr) and node.attr == "content":
        return _is_plain_variable(node.node, messages)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
        return _is_plain_variable(node.node, messages)
    return False


def _is_plain_variable(node: nodes.Node, names: Set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _unwrapped(node: nodes.Node) -> nodes.Node:
    """`node` without filters, tests and slices: `messages[1:] | list` still means the messages."""
    if isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        return _unwrapped(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _unwrapped(node.node)
    return node
