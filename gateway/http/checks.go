package httpapi

import (
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
)

// jsonType is shared by all answers; nobody changes it.
var jsonType = []string{"application/json"}

func (a *api) handleCheck(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	s.check = checkBody{Cost: 1}
	if p := a.decode(w, r, s, &s.check); p != nil {
		a.writeProblem(w, r, p)
		return
	}
	f := form{api: a}
	check := f.check(&s.check)
	if f.problem != nil {
		a.writeProblem(w, r, f.problem)
		return
	}
	if d := a.decide(w, r, s, check); d != nil {
		a.writeDecision(w, r, s, d, check.Cost == 0)
	}
}

// decide returns the decision on one check, or nil when it has written the problem that there is with it.
func (a *api) decide(w http.ResponseWriter, r *http.Request, s *scratch, check limit.Check) *limit.Decision {
	s.asks[0] = check // a Service keeps nothing of what it is asked
	results, err := a.Service.Check(r.Context(), s.asks[:])
	if err == nil {
		err = results[0].Err
	}
	if err != nil {
		a.writeProblem(w, r, problemOf(unbatched(err)))
		return nil
	}
	return &results[0].Decision
}

func (a *api) handleChecks(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	var body checksBody
	if p := a.decode(w, r, s, &body); p != nil {
		a.writeProblem(w, r, p)
		return
	}
	f := form{api: a}
	if len(body.Checks) == 0 {
		f.fail(invalid("checks", "must hold 1 to "+strconv.Itoa(limit.MaxBatch)+" checks"))
	}
	checks := elementsOf(&f, "checks", body.Checks, (*form).check)
	if f.problem != nil {
		a.writeProblem(w, r, f.problem)
		return
	}
	if body.Atomic {
		all, err := a.Service.CheckAll(r.Context(), checks)
		if err == nil {
			a.writeAll(w, r, s, all)
			return
		}
		a.writeBatchProblem(w, r, err, len(checks))
		return
	}
	results, err := a.Service.Check(r.Context(), checks)
	if err != nil {
		a.writeBatchProblem(w, r, err, len(checks))
		return
	}
	all := true
	for i := range results {
		all = all && results[i].Err == nil && results[i].Allowed
	}
	b := append(appendBool(s.out[:0], `{"allowed":`, all), `,"decisions":[`...)
	a.writeList(w, r, s, b, "checks", len(results), func(b []byte, i int) ([]byte, error) {
		return appendDecision(b, &results[i].Decision), results[i].Err
	})
}

func (a *api) writeAll(w http.ResponseWriter, r *http.Request, s *scratch, all limit.AllDecision) {
	b := appendBool(s.out[:0], `{"allowed":`, all.Allowed)
	if all.ReservationID != "" {
		b = appendString(b, `,"reservation_id":`, all.ReservationID)
	}
	b = appendInt(b, `,"delay_ms":`, quotaheader.RoundUp(all.Delay, time.Millisecond))
	b = append(b, `,"decisions":[`...)
	a.writeList(w, r, s, b, "", len(all.Decisions), func(b []byte, i int) ([]byte, error) { return appendDecision(b, &all.Decisions[i]), nil })
}

// writeBatchProblem writes the problem of a batch of checks as a whole.
func (a *api) writeBatchProblem(w http.ResponseWriter, r *http.Request, err error, checks int) {
	p := problemOf(err)
	if checks == 1 {
		p.ofElement("checks", 0)
	}
	a.writeProblem(w, r, p)
}

// appendItemError appends what stands in the place of a decision that could not be had.
func (a *api) appendItemError(b []byte, w http.ResponseWriter, r *http.Request, err error, list string, i int) []byte {
	p := problemOf(err)
	if p.cause != nil {
		a.logProblem(w, r, p)
	}
	p.ofElement(list, i)
	doc := p.body()
	out, err := json.Marshal(&doc, jsontext.AllowInvalidUTF8(true))
	if err != nil {
		a.Logger.ErrorContext(r.Context(), "answer not written", "endpoint", r.Pattern, "error", err)
	}
	b = append(b, `{"error":`...)
	b = append(b, out...)
	return append(b, '}')
}

func (a *api) writeDecision(w http.ResponseWriter, r *http.Request, s *scratch, d *limit.Decision, peek bool) {
	h := w.Header()
	h["Content-Type"] = jsonType
	s.out = quotaheader.Set(h, s.out, d)
	status := statusOf(d, peek)
	if status != http.StatusOK {
		quotaheader.SetRetryAfter(h, d)
	}
	s.out = appendDecision(s.out[:0], d)
	a.write(w, r, status, s.out)
}

func (a *api) writeJSON(w http.ResponseWriter, r *http.Request, status int, contentType string, v any) {
	out, err := marshal(v)
	if err != nil {
		a.unwritten(w, r, err)
		return
	}
	w.Header().Set("Content-Type", contentType)
	a.write(w, r, status, out)
}

// unwritten answers a request whose answer cannot be made.
func (a *api) unwritten(w http.ResponseWriter, r *http.Request, err error) {
	a.Logger.ErrorContext(r.Context(), "answer not written", "endpoint", r.Pattern, "error", err)
	w.WriteHeader(http.StatusInternalServerError)
}

// marshal writes an answer's JSON, limits as requests give them. What somebody else's text has that is no UTF-8 is replaced.
func marshal(v any) ([]byte, error) {
	return json.Marshal(v, jsontext.AllowInvalidUTF8(true), json.WithMarshalers(json.MarshalToFunc(func(enc *jsontext.Encoder, l *algo.Limit) error {
		return json.MarshalEncode(enc, limitBodyOf(l))
	})))
}

// write sends an answer. That it did not arrive is for the log at most: there is nobody left to tell.
func (a *api) write(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		a.Logger.DebugContext(r.Context(), "answer not written", "endpoint", r.Pattern, "error", err)
	}
}
