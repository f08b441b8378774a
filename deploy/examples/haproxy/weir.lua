-- http-request lua.weir POLICY asks Weir whether a request may pass, by the address that it comes from. It sets
-- txn.weir_status (200, 429 or 503 by a decision, otherwise what Weir answered; not set when it did not) and, where the
-- answer has them, txn.weir_ratelimit, txn.weir_ratelimit_policy and txn.weir_retry_after.
local url = "http://127.0.0.1:8079/v1/forward-auth?key_ip=true&policy="
local token = os.getenv("WEIR_TOKEN")

core.register_action("weir", { "http-req" }, function(txn, policy)
    local headers = { ["host"] = { "localhost" }, ["x-forwarded-for"] = { txn.f:src() } }
    if token then
        headers["weir-authorization"] = { "Bearer " .. token }
    end
    local answer = core.httpclient():get({ url = url .. policy, headers = headers, timeout = 3000 })
    if not answer or not answer.status or answer.status == 0 then
        return
    end
    -- HAProxy's own 502, 503 and 504, when it reaches no node, do not have this field.
    local by_weir = answer.headers and answer.headers["weir-status"]
    if answer.status >= 502 and not by_weir then
        return
    end
    txn:set_var("txn.weir_status", tostring(answer.status))
    for _, name in ipairs({ "ratelimit", "ratelimit-policy", "retry-after" }) do
        local values = answer.headers[name]
        if values then
            txn:set_var("txn.weir_" .. name:gsub("-", "_"), values[0])
        end
    end
end, 1)
