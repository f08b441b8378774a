package auth

import (
	"context"
	"net"
	"strings"

	"github.com/weirlimit/weir/limit"
)

// Event is an entry of the audit log: who did what, and from where. It has no token, and no key except Target's.
type Event struct {
	Action   Action
	Listener string // "http", "grpc" or "peer"; "file" for changes by a file
	// Caller is the caller's name in the access file, "everybody" without a file; empty when the caller is not
	// authenticated.
	Caller string
	// Credential is what the caller presented: "token", "certificate" or "none"; empty: not known.
	Credential string
	Identities string   // of the caller's certificate; empty: none
	From       net.Addr // nil: not known
	// Target is the policy or namespace and the key of a refund or reset, and the policy or namespace of a denied
	// check.
	Target limit.Target
	Units  int64  // of a refund: units asked for
	Result int64  // of a refund: units given back
	Reason string // of a denial: its Reason
	// What is the message of a denial, the step and key id of a changed gossip key, or the new and old settings of a
	// changed override.
	What string
	Err  error // why it failed; nil: it did not
}

// Action is the kind of an Event.
type Action string

// The actions.
const (
	ActionDenied    Action = "denied"
	ActionRefund    Action = "refund"
	ActionReset     Action = "reset"
	ActionGossipKey Action = "gossip_key"
	ActionOverride  Action = "override"
)

// maxIdentities bounds Identities, in bytes.
const maxIdentities = 300

// present sets what the credentials say of the caller.
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

// EventOf returns an Event of an action with the caller and listener of a context that Authorize has returned.
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

// audit passes an event to the audit log, if there is one.
func (a *Authorizer) audit(e Event) {
	if a.cfg.Audit != nil {
		a.cfg.Audit(e)
	}
}
