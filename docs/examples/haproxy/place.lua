-- Asks POST /internal/route where a request should go. Engines have addresses, no names.
local ROUTER = os.getenv("ROUTER") or "http://127.0.0.1:8092"

core.register_action("place", {"http-req"}, function(txn)
    local body, headers = txn.sf:req_body(), {["content-type"] = {"application/json"}}
    local session = txn.sf:req_hdr("x-session-id")
    if session and session ~= "" then headers["x-session-id"] = {session} end
    if #body < (tonumber(txn.sf:req_hdr("content-length")) or #body) then headers["x-body-truncated"] = {"1"} end

    local answer = core.httpclient():post{url = ROUTER .. "/internal/route", headers = headers, body = body}
    if not answer or answer.status ~= 200 then return end
    txn:set_var("txn.host", answer.body:match('"host":"([^"]+)"'))
    txn:set_var("txn.port", tonumber(answer.body:match('"port":(%d+)')))
    for name, value in answer.body:match('"request_headers":(%b{})'):gmatch('"([^"]+)":"([^"]*)"') do
        txn.http:req_set_header(name, value)
    end
end)
