package clustertest

import (
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// names is the DNS of a cluster as far as nodes need it: the headless Service under its name, and each pod under its own
// below that. Answers are kept for as long as they say they may be, those that say that there is no such name as well: that
// is how stale they get when CoreDNS has a cache before its own knowledge.
type names struct {
	service string // weir-headless.NAMESPACE.svc.cluster.local.
	ttl     time.Duration

	mu     sync.Mutex
	pods   map[string]netip.Addr // by host name
	kept   map[string]keptAnswer // by name
	silent bool
	asked  map[string]int // by who asked: how many questions about the Service
}

type keptAnswer struct {
	found []netip.Addr // none: no such name
	until time.Time
}

// clusterDomain is what every Service's name ends in.
const clusterDomain = "svc.cluster.local."

// serveNames answers on the switch of a network until the test ends.
func serveNames(t *testing.T, n *network, service string, ttl time.Duration) *names {
	t.Helper()
	s := &names{service: service, ttl: ttl, kept: make(map[string]keptAnswer), asked: make(map[string]int)}
	at := n.hubAddress() + ":53"
	udp, tcp := &dns.Server{Handler: s}, &dns.Server{Handler: s}
	err := n.hub.do(func() (err error) {
		if udp.PacketConn, err = net.ListenPacket("udp", at); err != nil {
			return err
		}
		tcp.Listener, err = net.Listen("tcp", at)
		return err
	})
	must.NoError(t, err)
	var work sync.WaitGroup
	t.Cleanup(work.Wait)
	for _, server := range []*dns.Server{udp, tcp} {
		started := make(chan struct{})
		begun := sync.OnceFunc(func() { close(started) })
		server.NotifyStartedFunc = begun
		work.Go(func() {
			defer begun()
			expect.NoError(t, server.ActivateAndServe(), "DNS")
		})
		<-started
		t.Cleanup(func() { expect.NoError(t, server.Shutdown(), "DNS") })
	}
	return s
}

// publish says which pods there are from now on.
func (s *names) publish(pods map[string]netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods = pods
}

// outage has questions go unanswered, or ends that.
func (s *names) outage(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = on
}

// questions tells how many somebody has asked about the Service.
func (s *names) questions(from string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[from]
}

// ServeDNS implements dns.Handler.
func (s *names) ServeDNS(w dns.ResponseWriter, question *dns.Msg) {
	answer := new(dns.Msg)
	answer.SetReply(question)
	answer.Authoritative = true
	if len(question.Question) != 1 {
		answer.Rcode = dns.RcodeFormatError
	} else if !s.answer(answer, question.Question[0], w.RemoteAddr()) {
		return
	}
	_ = w.WriteMsg(answer) // who asked may be gone
}

// answer completes an answer, and reports whether there is to be one.
func (s *names) answer(m *dns.Msg, q dns.Question, from net.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := strings.ToLower(q.Name)
	if host, _, err := net.SplitHostPort(from.String()); err == nil && name == s.service {
		s.asked[host]++
	}
	if s.silent {
		return false
	}
	found, rest := s.lookUp(name)
	if len(found) == 0 {
		m.Rcode = dns.RcodeNameError
		m.Ns = []dns.RR{&dns.SOA{
			Hdr: dns.RR_Header{Name: clusterDomain, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: rest},
			Ns:  "ns.dns." + clusterDomain, Mbox: "hostmaster." + clusterDomain, Minttl: rest,
		}}
		return true
	}
	if q.Qtype == dns.TypeA {
		for _, addr := range found {
			m.Answer = append(m.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: rest}, A: addr.AsSlice(),
			})
		}
	}
	return true
}

// lookUp returns the addresses of a name, and for how many seconds they may be kept.
func (s *names) lookUp(name string) (found []netip.Addr, rest uint32) {
	now := time.Now()
	kept, ok := s.kept[name]
	if !ok || !now.Before(kept.until) {
		kept = keptAnswer{until: now.Add(s.ttl)}
		for pod, addr := range s.pods {
			if name == s.service || name == pod+"."+s.service {
				kept.found = append(kept.found, addr)
			}
		}
		s.kept[name] = kept
	}
	return kept.found, uint32(kept.until.Sub(now).Seconds())
}
