"""The list of commands: what each does, in words that are not cut off."""


def test_no_command_is_described_by_half_a_sentence(say):
    said = say("--help")
    assert said.status == 0
    assert "Show what a model makes of a prompt." in said.out
    assert "List the values that a model serves, and why others are missing." in said.out
    assert "..." not in said.out.partition("Commands:")[2]
