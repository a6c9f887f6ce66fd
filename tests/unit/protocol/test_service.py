from bettercompute.protocol import messages, service


def test_paths_are_those_of_the_declared_service():
    declared = messages.Hello.DESCRIPTOR.file.services_by_name["AgentGateway"]
    assert declared.full_name == service.SERVICE
    assert {f"/{declared.full_name}/{method.name}" for method in declared.methods} == set(service.PATHS)


def test_only_join_needs_no_certificate():
    assert set(service.PATHS) - service.CERTIFICATE_PATHS == {service.JOIN}


def test_unary_paths_are_those_without_streams():
    methods = messages.Hello.DESCRIPTOR.file.services_by_name["AgentGateway"].methods
    unary = {f"/{service.SERVICE}/{m.name}" for m in methods if not (m.client_streaming or m.server_streaming)}
    assert unary == service.UNARY_PATHS
