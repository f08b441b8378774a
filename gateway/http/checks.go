package httpapi

import (
	"net/http"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
)

// jsonType is the Content-Type of answers. All answers share it, so that it must not be changed.
var jsonType = []string{"application/json"}

func (x *exchange) checkOne() {
	x.check = checkBody{}
	check, p := question(x, &x.check, (*form).check)
	if p != nil {
		x.problem(p)
	} else if d := x.decide(check); d != nil {
		x.decision(d, check.Cost == 0)
	}
}

// decide returns the decision on one check. It returns nil when it has answered with a problem.
func (x *exchange) decide(check limit.Check) *limit.Decision {
	x.asks[0] = check // a Service does not keep the checks
	results, err := x.Service.Check(x.r.Context(), x.asks[:])
	if err == nil {
		err = results[0].Err
	}
	if err != nil {
		x.problem(problemOf(unbatched(err)))
		return nil
	}
	return &results[0].Decision
}

func (x *exchange) checkAll() {
	var body checksBody
	checks, p := question(x, &body, (*form).checks)
	if p != nil {
		x.problem(p)
		return
	}
	var together limit.AllDecision
	var results []limit.Result
	var err error
	if body.Atomic {
		together, err = x.Service.CheckAll(x.r.Context(), checks)
	} else {
		results, err = x.Service.Check(x.r.Context(), checks)
	}
	if err != nil {
		p := problemOf(err)
		if len(checks) == 1 {
			p.ofElement("checks", 0)
		}
		x.problem(p)
		return
	}
	if body.Atomic {
		x.all(together)
		return
	}
	all := true
	for i := range results {
		all = all && results[i].Err == nil && results[i].Allowed
	}
	b := append(appendBool(x.out[:0], `{"allowed":`, all), `,"decisions":[`...)
	x.list(b, "checks", len(results), func(b []byte, i int) ([]byte, error) {
		return appendDecision(b, &results[i].Decision), results[i].Err
	})
}

// all writes the answer to an atomic batch.
func (x *exchange) all(all limit.AllDecision) {
	b := appendBool(x.out[:0], `{"allowed":`, all.Allowed)
	if all.ReservationID != "" {
		b = appendString(b, `,"reservation_id":`, all.ReservationID)
	}
	b = appendInt(b, `,"delay_ms":`, quotaheader.RoundUp(all.Delay, time.Millisecond))
	b = append(b, `,"decisions":[`...)
	x.list(b, "", len(all.Decisions), func(b []byte, i int) ([]byte, error) {
		return appendDecision(b, &all.Decisions[i]), nil
	})
}

// appendItemError appends the problem that takes the place of an element's decision.
func (x *exchange) appendItemError(b []byte, err error, list string, i int) []byte {
	p := problemOf(err)
	if p.cause != nil {
		x.logProblem(p)
	}
	p.ofElement(list, i)
	doc := p.body()
	out, err := json.Marshal(&doc, jsontext.AllowInvalidUTF8(true))
	if err != nil {
		x.Logger.ErrorContext(x.r.Context(), "answer not written", "endpoint", x.r.Pattern, "error", err)
	}
	b = append(b, `{"error":`...)
	b = append(b, out...)
	return append(b, '}')
}

func (x *exchange) decision(d *limit.Decision, peek bool) {
	h := x.w.Header()
	h["Content-Type"] = jsonType
	x.out = quotaheader.Set(h, x.out, d)
	status := statusOf(d, peek)
	if status != http.StatusOK {
		quotaheader.SetRetryAfter(h, d)
	}
	x.out = appendDecision(x.out[:0], d)
	x.write(status, x.out)
}

// json answers v in JSON, or 500 if it cannot be encoded.
func (x *exchange) json(status int, contentType string, v any) {
	out, err := marshal(v)
	if err != nil {
		x.Logger.ErrorContext(x.r.Context(), "answer not written", "endpoint", x.r.Pattern, "error", err)
		x.w.WriteHeader(http.StatusInternalServerError)
		return
	}
	x.w.Header().Set("Content-Type", contentType)
	x.write(status, out)
}

// marshal encodes an answer, with limits in the form of requests. Invalid UTF-8, which texts of callers and nodes may
// have, is replaced.
func marshal(v any) ([]byte, error) {
	limits := json.MarshalToFunc(
		func(enc *jsontext.Encoder, l *algo.Limit) error { return json.MarshalEncode(enc, limitBodyOf(l)) })
	return json.Marshal(v, jsontext.AllowInvalidUTF8(true), json.WithMarshalers(limits))
}

// write sends an answer. A failure is logged at debug, because the caller is gone.
func (x *exchange) write(status int, body []byte) {
	if x.held == 0 && cap(body) > leastCounted {
		x.keep(int64(cap(body)))
	}
	x.w.WriteHeader(status)
	if _, err := x.w.Write(body); err != nil {
		x.Logger.DebugContext(x.r.Context(), "answer not written", "endpoint", x.r.Pattern, "error", err)
	}
}
