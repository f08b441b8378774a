package httpapi

import (
	"net/http"

	"github.com/weirlimit/weir/limit"
)

// amount reads a cost, of at least so many units where it is given as such, which is otherwise where it is left out.
func (b *amountBody) amount(least, otherwise int64) (limit.Amount, *problem) {
	switch {
	case b.Cost == nil && b.Usage == nil:
		return limit.Amount{Cost: otherwise}, nil
	case b.Cost == nil:
		return limit.Amount{Usage: b.Usage}, nil
	case b.Usage != nil:
		return limit.Amount{}, invalid("usage", "is given beside cost: send one of them")
	}
	return limit.Amount{Cost: *b.Cost}, askFor(*b.Cost, least, "")
}

// given says that the cost is not left out.
func (b *amountBody) given() bool { return b.Cost != nil || b.Usage != nil }

func validID(requestID string) *problem { return askFor(1, 1, requestID) }

func (a *api) reserveOf(b *reserveBody) (r limit.Reserve, p *problem) {
	r = limit.Reserve{Estimate: !b.given(), Class: b.Class, RequestID: b.RequestID}
	if r.Target, p = a.target(&b.targetBody); p == nil {
		r.Amount, p = b.amount(1, 1)
	}
	if p == nil {
		p = validID(b.RequestID)
	}
	if p == nil {
		r.TTL, p = lifetime(b.TTL)
	}
	return r, p
}

func (a *api) handleReserve(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	var body reserveBody
	p := a.decode(w, r, s, &body)
	var ask limit.Reserve
	if p == nil {
		ask, p = a.reserveOf(&body)
	}
	if p != nil {
		a.writeProblem(w, r, p)
		return
	}
	d, err := a.Service.Reserve(r.Context(), ask)
	a.answerDecision(w, r, s, &d, err, false)
}

func (a *api) handleReserves(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	var body reservesBody
	p := a.decode(w, r, s, &body)
	asks := make([]limit.Reserve, len(body.Reserves))
	for i := range asks {
		if p != nil {
			break
		}
		if asks[i], p = a.reserveOf(&body.Reserves[i]); p != nil {
			p.ofElement("reserves", i)
		}
	}
	if p != nil {
		a.writeProblem(w, r, p)
		return
	}
	all, err := a.Service.ReserveAll(r.Context(), asks)
	if err != nil {
		a.writeProblem(w, r, problemOf(err))
		return
	}
	a.writeAll(w, r, s, &all)
}

func (a *api) handleExtend(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	var body extendBody
	p := a.decode(w, r, s, &body)
	ask := limit.Extend{ReservationID: body.ReservationID, RequestID: body.RequestID}
	if p == nil {
		ask.Target, p = a.target(&body.targetBody)
	}
	if p == nil {
		p = needReservation(body.ReservationID)
	}
	if p == nil {
		ask.Amount, p = body.amount(0, 0)
	}
	if p == nil {
		p = validID(body.RequestID)
	}
	if p == nil {
		ask.TTL, p = lifetime(body.TTL)
	}
	if p != nil {
		a.writeProblem(w, r, p)
		return
	}
	d, err := a.Service.Extend(r.Context(), ask)
	a.answerDecision(w, r, s, &d, err, false)
}

func (a *api) handleCommit(w http.ResponseWriter, r *http.Request) {
	var body commitBody
	t, p := a.readTarget(w, r, &body, &body.targetBody)
	ask := limit.Commit{Target: t, ReservationID: body.ReservationID, Exact: body.Overrun == "error", Class: body.Class}
	switch {
	case p != nil:
	case !body.given():
		p = invalid("cost", "must be given: what it did cost; or usage, what was used")
	case body.Overrun != "" && body.Overrun != "charge" && body.Overrun != "error":
		p = invalid("overrun", "must be charge or error")
	default:
		if p = needReservation(body.ReservationID); p == nil {
			ask.Amount, p = body.amount(0, 0)
		}
	}
	if p != nil {
		a.writeProblem(w, r, p)
		return
	}
	got, err := a.Service.Commit(r.Context(), ask)
	a.answer(w, r, err, &struct {
		Refunded  int64 `json:"refunded"`
		Excess    int64 `json:"excess"`
		OverLimit bool  `json:"over_limit"`
	}{got.Refunded, got.Excess, got.Over})
}

func (a *api) handleCharge(w http.ResponseWriter, r *http.Request) {
	s := a.scratch()
	defer a.recycle(s)
	var body chargeBody
	p := a.decode(w, r, s, &body)
	ask := limit.Charge{RequestID: body.RequestID}
	if p == nil {
		ask.Target, p = a.target(&body.targetBody)
	}
	if p == nil {
		ask.Amount, p = body.amount(1, 1)
	}
	if p == nil {
		p = validID(body.RequestID)
	}
	if p != nil {
		a.writeProblem(w, r, p)
		return
	}
	d, err := a.Service.Charge(r.Context(), ask)
	a.answerDecision(w, r, s, &d, err, true) // it was charged, whether or not it fits
}
