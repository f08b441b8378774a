package auth

import (
	"context"
	"net"
	"strings"

	"github.com/weirlimit/weir/limit"
)

// Event is something that an audit log keeps: who did what, from where. It holds no token, and no key but the one of Target.
type Event struct {
	Action   Action
	Listener string // "http", "grpc" or "peer"; "file" for what a changed file has done
	// Caller is the caller's name in the access file, "everybody" without one; empty when the caller is not authenticated.
	Caller string
	// Credential is what the caller presented: "token", "certificate" or "none"; empty when that is not known.
	Credential string
	Identities string   // of the caller's certificate, if there is one
	From       net.Addr // nil: not known
	// Target is the policy, or namespace, and the key of a refund or a reset; and of a denied check its policy or namespace.
	Target limit.Target
	Units  int64  // of a refund: how many were asked for
	Result int64  // of a refund: how many were given back
	Reason string // of a denial: one of its reasons
	// What is of a denial: its message; of a changed gossip key: the step, and the key's id; of a changed override: what it is and was.
	What string
	Err  error // why it was not done, if it was not
}

// Action is what an Event is about.
type Action string

// The actions.
const (
	ActionDenied    Action = "denied"
	ActionRefund    Action = "refund"
	ActionReset     Action = "reset"
	ActionGossipKey Action = "gossip_key"
	ActionOverride  Action = "override"
)

// maxIdentities bounds what an Event repeats of a certificate.
const maxIdentities = 300

// present fills in what credentials say of who and from where.
func (e *Event) present(c *Credentials) {
	e.From = c.From
	switch {
	case len(c.Authorization) > 0:
		e.Credential = "token"
	case c.certified():
		e.Credential = "certificate"
	default:
		e.Credential = "none"
	}
	if c.certified() {
		e.Identities = strings.Join(Identities(c.TLS.PeerCertificates[0]), " ")
		e.Identities = e.Identities[:min(len(e.Identities), maxIdentities)]
	}
}

// EventOf returns an Event of an action with the caller, and the listener, of a context that Authorize has returned.
func EventOf(ctx context.Context, action Action) Event {
	e := Event{Action: action}
	if s, ok := ctx.Value(sessionKey{}).(*session); ok {
		e.Listener = s.listener
		e.present(&s.credentials)
		if k := s.known.Load(); k.caller != nil {
			e.Caller = k.caller.Name
		}
	}
	return e
}

// audit hands an event to the audit log, if there is one.
func (a *Authorizer) audit(e Event) {
	if a.cfg.Audit != nil {
		a.cfg.Audit(e)
	}
}
