"""A server of model files, with OpenAI's API: `tformer-serve FILE.onnx …`. docs/serving.md describes it.

capabilities     the paths of a model
errors           errors in the form of OpenAI's API
options          how a server treats its clients
request_context  a request and its response, for logs, metrics and the deadline
logs             JSON logs
registry         the models
metrics          metrics in Prometheus' form
reloads          loads files again while the server serves
middleware/      layers around the routes: ids, deadlines, keys, places, sizes of bodies
state            what the routes share
client_inputs    inputs of clients, which are untrusted
responses/       forms of answers: OpenAI's API, event streams, subtitles
generation       opens requests of a model under the limits of the server
calls            other calls than generation, of the inputs of a request
schemas/         bodies of requests
body_route       routes whose body is JSON
routes/          one module for each task
app              the application
connection       a connection of HTTP/1
server           listens, and stops without losing a request
cli              the command line
ray/             the application as a deployment of Ray Serve
"""
