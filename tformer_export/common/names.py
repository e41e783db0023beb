"""How values of a compiled graph are called that several stages of the compiler look for."""

CONTEXT = "context."  # how the decode inputs for the context begin
ENCODED = ".encoded"  # an encode output is called as the decode input that it becomes, with this behind it
