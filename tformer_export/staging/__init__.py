"""Which part of the graph is known when: constants, the request, each step; and what a step must remember."""
