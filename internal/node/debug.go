package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"

	"github.com/weirlimit/weir/internal/netaddr"
)

// debugRequests is how many requests the debug port answers at a time: a profile costs the node something while it is taken.
const debugRequests = 2

// debugServer serves the runtime's profiles at /debug/pprof/. It is a server of its own, for loopback alone, so that nothing
// that faces callers can be made to show them: a profile tells what a node does, and a heap dump's labels what it holds.
// Of what net/http/pprof has, the command line and the look-up of symbols are left out.
func debugServer(log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	busy := make(chan struct{}, debugRequests)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !netaddr.LoopbackHostPort(r.Host) {
				// A page in a browser on this machine may have been given this address under a name of its own.
				http.Error(w, "ask for 127.0.0.1 or localhost", http.StatusForbidden)
				return
			}
			select {
			case busy <- struct{}{}:
				defer func() { <-busy }()
				mux.ServeHTTP(w, r)
			default:
				http.Error(w, "busy with other profiles", http.StatusServiceUnavailable)
			}
		}),
		ReadTimeout:    5 * time.Second,
		WriteTimeout:   time.Minute, // and the time that a profile takes
		IdleTimeout:    time.Minute,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// openDebug serves the debug port, whatever address the other ports are bound to. The node does not fail with it. It ends after all that
// opens later, so that stopping can be looked at.
func (n *Node) openDebug() error {
	if n.cfg.DebugPort == PortOff {
		return nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(max(n.cfg.DebugPort, 0)))))
	if err != nil {
		return fmt.Errorf("debug-port: %w", err)
	}
	server := debugServer(n.log)
	n.debugAddr = l.Addr().String()
	n.log.Info("profiles served", "url", "http://"+n.debugAddr+"/debug/pprof/")
	n.work.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Warn("debug server failed", "error", err)
		}
	})
	n.closing(func(context.Context) { _ = server.Close() })
	return nil
}
