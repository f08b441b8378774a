package node

import (
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/reload"
)

// security is the part of a node that authenticates and encrypts.
type security struct {
	cfg     Security
	now     func() time.Time // the time by which certificates expire; nil: time.Now
	stderr  io.Writer        // for an audit log to stderr
	log     *slog.Logger
	metrics *observe.Security
	denials *denials
	callers *reload.Certs                  // nil: plain text
	peers   *reload.Certs                  // nil: plain text
	access  *reload.Watcher[*auth.Callers] // nil: no access file
	auth    *auth.Authorizer
	audit   *observe.AuditLog // nil: none
	files   []followedFile

	gossipKeys  *reload.Watcher[[][]byte] // nil: gossip in plain text
	keysChanged fifo.Signal               // set when the gossip key file has changed
}

// openSecurity reads the files. If it fails, nothing is left open.
func openSecurity(of *Config) (_ *security, err error) {
	cfg, log := of.Security, of.Logger
	s := &security{cfg: cfg, now: of.Now, stderr: of.Stderr, log: log, keysChanged: fifo.NewSignal()}
	s.metrics = observe.NewSecurity(s.expiries)
	s.denials = newDenials(log, s.metrics)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if files := cfg.tls(); files != (reload.CertFiles{}) {
		if s.callers, err = s.openCerts("certificates", files, callerSettings, ""); err != nil {
			return nil, err
		}
		s.follows(s.callers, "certificates")
	}
	if files := cfg.peerTLS(); files != (reload.CertFiles{}) {
		if s.peers, err = s.openCerts("peer_certificates", files, peerSettings, cfg.PeerTLSName); err != nil {
			return nil, err
		}
		s.follows(s.peers, "peer_certificates")
	}
	if err = s.openAudit(); err != nil {
		return nil, fmt.Errorf("audit-log: %w", err)
	}
	authConfig := auth.Config{
		NeedCertificate: cfg.TLSClientCAFile != "" && cfg.AccessFile == "",
		Denied:          s.denials.note,
		Now:             s.denials.now,
	}
	if s.audit != nil { // without an audit log Audit must stay nil
		authConfig.Audit = s.audit.Record
	}
	if cfg.AccessFile != "" {
		if s.access, err = s.openAccess(); err != nil {
			return nil, fmt.Errorf("access-file: %w", err)
		}
		authConfig.Callers = s.access.Current
	}
	s.auth = auth.New(authConfig)
	if cfg.GossipKeyFile != "" {
		if s.gossipKeys, err = s.openGossipKeys(); err != nil {
			return nil, fmt.Errorf("gossip-key-file: %w", err)
		}
	}
	return s, nil
}

// openAudit opens the audit log, if the node has one.
func (s *security) openAudit() (err error) {
	if s.cfg.AuditLog == "" {
		return nil
	}
	s.audit, err = observe.OpenAudit(observe.AuditConfig{
		Name: s.cfg.AuditLog, Stderr: s.stderr, Now: s.denials.now, MaxQueued: admission.LogQueue,
		OnError: func(err error) { s.log.Error("audit log not written", "error", err) },
	})
	return err
}

// close ends the watches and the audit log.
func (s *security) close() {
	closeFiles(s.files)
	if err := s.audit.Close(); err != nil {
		s.log.Warn("audit log not closed", "error", err)
	}
}

func (s *security) openAccess() (*reload.Watcher[*auth.Callers], error) {
	parse := func(contents [][]byte) (*auth.Callers, error) { return auth.Parse(s.cfg.AccessFile, contents[0]) }
	return watch(s, "access", s.cfg.AccessFile, reload.Config[*auth.Callers]{Parse: parse})
}

// openGossipKeys reads the gossip keys, and watches their file.
func (s *security) openGossipKeys() (*reload.Watcher[[][]byte], error) {
	parse := func(contents [][]byte) ([][]byte, error) { return cluster.ParseKeys(s.cfg.GossipKeyFile, contents[0]) }
	changed := func([][]byte) { s.keysChanged.Set() }
	return watch(s, "gossip_keys", s.cfg.GossipKeyFile, reload.Config[[][]byte]{Parse: parse, OnChange: changed})
}

// watch reads a file and watches it.
func watch[T any](s *security, what, file string, cfg reload.Config[T]) (*reload.Watcher[T], error) {
	s.metrics.Watching(what)
	changed := cfg.OnChange
	cfg.OnError, cfg.OnChange = s.reloadFailed(what), func(v T) {
		s.metrics.Reloaded(what, true)
		s.log.Info("security file changed", "what", what)
		if changed != nil {
			changed(v)
		}
	}
	w, err := reload.Start([]string{file}, cfg)
	if err == nil {
		s.follows(w, what)
	}
	return w, err
}

// openCerts opens certificates. If ownName is not empty, this node's own certificate must have that name, as it demands
// of others.
func (s *security) openCerts(what string, files, flags reload.CertFiles, ownName string) (*reload.Certs, error) {
	s.metrics.Watching(what)
	return reload.OpenCerts(files, reload.CertConfig{
		Flags: flags, OwnName: ownName, Now: s.now,
		OnChange: func() {
			s.metrics.Reloaded(what, true)
			s.log.Info("security file changed", "what", what)
		},
		OnError: s.reloadFailed(what),
	})
}

// reloadFailed returns the function that notes that changed files are invalid.
func (s *security) reloadFailed(what string) func(error) {
	return func(err error) {
		s.metrics.Reloaded(what, false)
		s.log.Error("security file rejected", "what", what, "error", err, "hint", "the previous content stays in force")
	}
}

// expiries returns when the certificates in use expire.
func (s *security) expiries() map[string]time.Time {
	all := make(map[string]time.Time)
	if s.callers != nil {
		all["callers"] = s.callers.Expiry()
	}
	if s.peers != nil {
		all["peers"] = s.peers.Expiry()
	}
	return all
}
