-- Asks POST /internal/route where a request should go. Engines have addresses, no names.
local ROUTER = os.getenv("ROUTER") or "http://127.0.0.1:8092"
-- Of a body in chunks, which does not say how long it is: nearly tune.bufsize, so the rest may be missing.
local LONG = 240000

core.register_action("place", {"http-req"}, function(txn)
    local body, headers = txn.sf:req_body(), {["content-type"] = {"application/json"}}
    local session = txn.sf:req_hdr("x-session-id")
    if session and session ~= "" then headers["x-session-id"] = {session} end
    local length = tonumber(txn.sf:req_hdr("content-length"))
    if #body < (length or #body) or (not length and #body > LONG) then headers["x-body-truncated"] = {"1"} end

    local answer = core.httpclient():post{url = ROUTER .. "/internal/route", headers = headers, body = body}
    if not answer or answer.status ~= 200 then return end
    txn:set_var("txn.host", answer.body:match('"host":"([^"]+)"'))
    txn:set_var("txn.port", tonumber(answer.body:match('"port":(%d+)')))
    for name, value in answer.body:match('"request_headers":(%b{})'):gmatch('"([^"]+)":"([^"]*)"') do
        txn.http:req_set_header(name, value)
    end
end)
