"""Names of values in a compiled graph that several folders of the compiler look up."""

CONTEXT = "context."  # prefix of the decode inputs for the context
ENCODED = ".encoded"  # suffix of an encode output; its stem is the name of the decode input that it becomes
