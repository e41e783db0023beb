"""What a server allows its clients, as layers of ASGI around the routes. From the outside to the inside:

request_scope  the id of a request, its deadline, its line in the log, its metrics, its span, and its errors
tracing        a span of OpenTelemetry for each request
web_pages      which web pages may read answers, by the host and the origin of a request
api_keys       keys of clients and of operators
admission      how many requests may be open at once, and the end of the server
body_limit     a body is read whole, up to a size, before anything parses it
held_models    the models of a request stay open until its end
"""
